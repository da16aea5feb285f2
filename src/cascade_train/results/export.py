"""Exports of trained models: of a run's checkpoint, of weights and adapters in other formats.

Lives here: what is read, and which formats fit it; each is read back, and its relative error printed. Must not live
here: how a format is written (models/formats/).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from omegaconf import DictConfig
from torch import Tensor

from cascade_train.assembly.components import build_component, build_parts, families
from cascade_train.assembly.model import build_phases
from cascade_train.assembly.model_card import CARD, SAMPLES, write_card
from cascade_train.assembly.run import write_exports
from cascade_train.config.saved import CONFIG_NAME, load_saved_config
from cascade_train.distributed.consensus import from_rank_zero
from cascade_train.distributed.process_group import World, process_group
from cascade_train.engine.checkpoint.folder import find_fault
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.optimizer import Averaging
from cascade_train.engine.phase import BoundPhase, restore_training_state
from cascade_train.engine.power_function import solve
from cascade_train.errors import ConfigError, RunError
from cascade_train.files.durable import write_durably
from cascade_train.files.hub import push_folder
from cascade_train.files.output import EXPORTER, check_output
from cascade_train.files.run_folder import EXPORT, EXPORTED, exported_step
from cascade_train.files.untrusted import read_regular
from cascade_train.models.family import Family
from cascade_train.models.formats.export import DTYPES, save_network
from cascade_train.models.formats.export_lora import check_format, export_lora, read_changes
from cascade_train.models.formats.lora_files import holds_lora, module_shapes, read_lora
from cascade_train.models.formats.weights import load_state
from cascade_train.models.formats.weights_source import LORA_FILES, NETWORK_FILES, SINGLE_FILE
from cascade_train.results.find import run_of, stored_network, whole_pipeline
from cascade_train.tasks.base import Task
from cascade_train.tasks.lora import LoRA

log = logging.getLogger(__name__)

MOST_ERROR = 0.1
"""Largest relative error (L2 norm) of the profile of a built average."""


def check_replaceable(
    out: Path, formats: Sequence[str], *, of_run: bool, is_own: bool, overwrite: bool, inputs: Sequence[str]
) -> None:
    """Raise a ConfigError where an export would replace what none has written.

    Those beside the weights are known by the card. `is_own`: the folder is that of a run for its export.
    """
    check = partial(check_output, command=EXPORTER, overwrite=overwrite)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file. Give the folder to write into.")
    card, known = out / CARD, NETWORK_FILES | LORA_FILES
    names = {known[name].format(part=part) for family in families() for part in family.parts for name in formats}
    names |= {name for family in families() for name in family.uses if of_run}
    for path in [out / name for name in names]:
        check(path, is_folder=path.suffix != ".safetensors", inputs=inputs)
    has_card = card.is_file() and b"\n- cascade_train\n" in read_regular(card)  # a tag of its front matter
    for path in [] if is_own or has_card else [card, out / SAMPLES, *([out / CONFIG_NAME] if of_run else ())]:
        check(path)


def export_run(
    run: Path, out: Path, *, step: int | None, weights: str | None, average: float | None, allow_any_target: bool
) -> None:
    """Write a run's export from a checkpoint as `export_checkpoint`, and print which it was."""
    cfg = load_saved_config(run, allow_any_target=allow_any_target)
    with process_group() as world:
        place = run / "checkpoints"
        checkpoint = export_checkpoint(cfg, place, world, step=step, weights=weights, average=average, out=out)
    sys.stdout.write(f"{checkpoint.name} of {run} is exported to {out}\n")


def export_checkpoint(
    cfg: DictConfig,
    checkpoints: Path,
    world: World,
    *,
    step: int | None,
    weights: str | None = None,
    average: float | None = None,
    out: Path,
) -> Path:
    """Load a checkpoint of a run, write the run's export from it, and return the checkpoint. Collective.

    `weights` is "trained" or "average", the one of `ema`; None = the average where there is one. `average` is the
    length of another one. An export in the run's own folder says of which step it is, unless it is of other weights
    than the run's own.

    Raises:
        ConfigError: no such checkpoint, one of another model, or no such average in those that are there.
        RunError: the checkpoint asked for is damaged, or what was written reads back differently.
    """
    if average is not None and cfg.ema.post_hoc is None:
        raise ConfigError(
            f"average={average}: the checkpoints of {checkpoints.parent} keep no averages to build it from. Train with "
            "ema.post_hoc=[0.05,0.1] checkpoint.keep_every_steps=<steps>, or leave average=null."
        )
    has_average = cfg.ema.decay is not None
    if weights == "average" and not has_average:
        raise ConfigError(f"weights=average: {checkpoints.parent} has none, since ema.decay=null. Leave weights=null.")
    parts = build_parts(cfg)
    phases = build_phases(cfg, parts, world)
    if weights == "trained" and any(isinstance(phase.optimizer, Averaging) for phase in phases):
        raise ConfigError(
            f"weights=trained: the optimizer of {checkpoints.parent} averages the weights itself, and its average is "
            "the result of the training. Leave weights=null."
        )
    is_other = average is not None or (weights == "trained" and has_average)
    store = CheckpointStore(checkpoints)

    def verified() -> Path:
        path = find_checkpoint(store, step)
        if step is not None and (fault := find_fault(path)) is not None:  # the newest is verified already
            raise RunError(f"from={checkpoints.parent}: the checkpoint of step {step} is damaged: {fault}.")
        return path

    path = from_rank_zero(verified)
    at = int(path.name.removeprefix("step_"))
    if average is None:
        restore_training_state(store, path, phases, parts.task, optimizer=False)
    else:
        restore_average(list(cfg.ema.post_hoc), store, phases, parts.task, step=at, length=average)
    note = checkpoints.parent / EXPORT / EXPORTED if out.resolve() == (checkpoints.parent / EXPORT).resolve() else None
    if note is not None and (is_other or exported_step(checkpoints.parent) != at):
        from_rank_zero(lambda: note.unlink(missing_ok=True))  # what lies there is of another step from now on
    write_exports(cfg, parts.task, phases, out, run=checkpoints.parent, step=at, average=weights != "trained")
    if note is not None and not is_other and not note.exists():
        from_rank_zero(lambda: write_durably(note, json.dumps({"step": at}) + "\n"))
    return path


def restore_average(
    lengths: Sequence[float],
    store: CheckpointStore,
    phases: Sequence[BoundPhase],
    task: Task,
    *,
    step: int,
    length: float,
) -> None:
    """Load the checkpoint of a step with an average of a length in the place of its weights. Collective.

    It is a sum of the averages of `lengths` in checkpoints up to there (Karras et al. 2024, section 3.2).
    """
    found = [step] if length in lengths else [at for at in store.steps() if at <= step]
    paths = {at: store.directory / f"step_{at}" for at in found}
    steps = from_rank_zero(lambda: [at for at, path in paths.items() if find_fault(path) is None])
    coefficients, error = solve([(at, each) for at in steps for each in lengths], step, length)
    if error > MOST_ERROR:
        raise ConfigError(
            f"average={length} cannot be built from the averages of {lengths} in {len(steps)} checkpoints up to "
            f"step {step}: the nearest differs by {error:.0%}, {MOST_ERROR:.0%} is the most. Choose a length nearer to "
            "those, or train with more checkpoints: checkpoint.keep_every_steps."
        )
    totals: list[dict[str, Tensor]] = [{} for _ in phases]
    for number, at in enumerate(steps):
        restore_training_state(store, paths[at], phases, task, optimizer=False)
        shares = coefficients[number * len(lengths) :][: len(lengths)]
        for phase, total in zip(phases, totals, strict=True):
            if phase.post_hoc is not None:
                phase.post_hoc.add_to(total, shares)
    for phase, total in zip(phases, totals, strict=True):
        if total:
            phase.replace_weights(total)
    log.info("The average %g is built from %d checkpoints; its profile differs by %.2g.", length, len(steps), error)


def find_checkpoint(store: CheckpointStore, step: int | None) -> Path:
    """Folder of the checkpoint of a step, None = of the newest."""
    path = store.newest() if step is None else store.directory / f"step_{step}"
    if path is None or not path.is_dir():
        there = ", ".join(map(str, store.steps())) or "none"
        raise ConfigError(
            f"from={store.directory.parent}: no checkpoint{'' if step is None else f' of step {step}'}; steps that are "
            f"there: {there}."
        )
    return path


def export_single_file(source: str, out: Path, *, dtype: str | None) -> list[str]:
    """Write a whole pipeline as one file in `out`; return its name. A ConfigError where `source` holds none."""
    found, name = whole_pipeline(source), NETWORK_FILES[SINGLE_FILE]
    if found is None:
        raise ConfigError(
            f"format={SINGLE_FILE}: from={source} holds no pipeline that is written as one file. Name a run of "
            "task=finetune on a model that has one, its export, or a pipeline's folder."
        )
    family, folder, _ = found
    error = family.save_single_file(folder, out / name, dtype=DTYPES.get(dtype or ""), title=_title(source))
    _print_error(out / name, error)
    return [name]


def _title(source: str) -> str:
    """Title of a file: the name of the run, folder or file that it was made from."""
    return (run_of(Path(source)) or Path(source)).absolute().stem


def _prediction(source: str, *, allow_any_target: bool) -> str | None:
    """What a run's network predicts, by diffusers' name; "" = something else, None = no run left `source`."""
    if (run := run_of(Path(source))) is None:
        return None
    objective = build_component(load_saved_config(run, allow_any_target=allow_any_target), "objective")
    return str((objective.scheduler_config() or {}).get("prediction_type", ""))


def convert(
    source: str,
    formats: Sequence[str],
    out: Path,
    *,
    model: str | None,
    module_filters: Sequence[str] | None,
    dtype: str | None,
    allow_any_target: bool,
) -> list[str]:
    """Write weights or adapters, in any format that is read, in these formats into `out`; return the files' names.

    `model`, `module_filters` and `dtype` as of `WeightsArgs`. A ConfigError for a format that is not of their kind.
    """
    network = stored_network(source, model=model, key="from", allow_any_target=allow_any_target)
    is_lora = holds_lora(source)
    names = _file_names(source, network.family, formats, dtype, is_lora=is_lora)
    if is_lora:
        modules = module_shapes(network)
        lora = read_lora(source, key="from", family=network.family, modules=modules, module_filters=module_filters)
        for name in formats:
            path = out / names[name]
            prediction = _prediction(source, allow_any_target=allow_any_target)
            error = export_lora(lora, network, path, format=name, title=_title(source), prediction=prediction)
            _print_error(path, error)
        return [names[name] for name in formats]
    config = dict(network.config)
    state = load_state(network, source, dtype=DTYPES.get(dtype or ""), key="from")
    files = {name: names[name].format(part=network.family.part_of(config)) for name in formats}
    _check_no_pipeline(out, files, dtype)
    for name, file in files.items():
        if not (dtype is None and name == "diffusers" and Path(source) == out):  # which a run has exported
            _print_error(out / file, save_network(network.family, state, config, out / file, format=name))
    return list(files.values())


def _file_names(
    source: str, family: Family, formats: Sequence[str], dtype: str | None, *, is_lora: bool
) -> Mapping[str, str]:
    """File of each format of weights or adapters; a ConfigError for a format or dtype that is not theirs."""
    names = {name: LORA_FILES[name] for name in family.lora_formats} if is_lora else NETWORK_FILES
    for name in formats:
        if name not in names:
            kind = "adapters" if is_lora else "a network's weights"
            raise ConfigError(f"format={name}: from={source} holds {kind}, whose formats are {', '.join(names)}.")
    if is_lora and dtype is not None:
        raise ConfigError(f"dtype={dtype}: is for a network's weights; adapters are written in fp32. Leave it out.")
    return names


def _check_no_pipeline(out: Path, files: Mapping[str, str], dtype: str | None) -> None:
    """Refuse to replace a pipeline by its network in another dtype."""
    folder = out / files.get("diffusers", "")
    if dtype is not None and "diffusers" in files and (folder / "model_index.json").is_file():
        raise ConfigError(
            f"dtype={dtype}: format=diffusers would replace the pipeline in {folder} by its network. Write the network"
            " of an export into another folder: from=<export> out=<folder>."
        )


def check_run(
    run: Path, formats: Sequence[str], *, model: str | None, dtype: str | None, allow_any_target: bool
) -> None:
    """Raise a ConfigError, before a run is exported, for what `convert` would refuse of its kind."""
    cfg = load_saved_config(run, allow_any_target=allow_any_target)
    if isinstance(build_component(cfg, "task"), LoRA):  # which may have no export yet
        _file_names(str(run), build_component(cfg, "model").family, formats, dtype, is_lora=True)
        for name in formats:
            check_format(name, dora=bool(cfg.task.get("dora")))
        return
    network = stored_network(str(run), model=model, key="from", allow_any_target=allow_any_target)
    names = _file_names(str(run), network.family, formats, dtype, is_lora=False)
    part = network.family.part_of(dict(network.config))
    _check_no_pipeline(run / EXPORT, {name: names[name].format(part=part) for name in formats}, dtype)


def merge(
    source: str,
    loras: Sequence[str],
    strengths: Sequence[float],
    out: Path,
    *,
    model: str | None,
    module_filters: Sequence[str] | None,
    dtype: str | None,
    allow_any_target: bool,
) -> None:
    """Write weights with adapters merged into them: a file where `out` ends in .safetensors, else diffusers' folder."""
    network = stored_network(source, model=model, key="from", allow_any_target=allow_any_target)
    config = dict(network.config)
    change = read_changes(network, loras, strengths, key="lora", module_filters=module_filters)
    state = load_state(network, source, dtype=DTYPES.get(dtype or ""), key="from", change=change)
    format = "original" if out.suffix == ".safetensors" else "diffusers"
    _print_error(out, save_network(network.family, state, config, out, format=format, command="merge"))


def _print_error(path: Path, error: float) -> None:
    """Print where an export lies and how it reads back."""
    sys.stdout.write(f"{path}: read back with a relative error of {error:.1e}\n")


def write_card_of(
    out: Path,
    written: Sequence[str],
    *,
    source: str,
    step: int | None,
    all_of_run: bool,
    push: str | None,
    private: bool,
) -> None:
    """Write the model card of what lies in `out` now, of a run all of it, and push it where `push` is set."""
    known = dict.fromkeys(name for family in families() for name in family.uses)
    names = [name for name in known if name in written or (all_of_run and (out / name).exists())]
    if written:
        write_card(out, names, source=source, run=run_of(Path(source)), step=step)
    if push is not None:
        patterns = [CARD, SAMPLES, CONFIG_NAME, *names, *(f"{name}/*" for name in names), "*.embeddings/*"]
        sys.stdout.write(f"Pushed to {push_folder(out, push, private=private, names=patterns)}\n")
