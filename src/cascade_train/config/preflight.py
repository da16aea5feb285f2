"""Refuse a configuration that cannot train, before anything is built or written.

Order: nothing missing, interpolations, typed nodes, components, then the rules that tie nodes together. Components are
imported once everything that the typed nodes refuse is refused.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cascade_train.config.components import (
    CONTRACTS,
    check_component,
    check_is_component,
    missing_message,
)
from cascade_train.config.groups import chosen, did_you_mean, option_files, option_targets
from cascade_train.config.schema import COMPONENTS, ParallelMode, Precision, Root
from cascade_train.config.schema_outputs import TrackerName
from cascade_train.config.targets import check_targets, class_constant, components_in, is_component
from cascade_train.errors import ConfigError, install_hint
from cascade_train.files.run_folder import is_run
from cascade_train.options import AUTO

EXTRAS = {
    "tracker.name": {str(name): str(name) for name in TrackerName if name != "none"} | {"comet": "comet_ml"},
    "attention": {"xformers": "xformers"},
}
"""Choices that need a library of an extra: key -> choice -> library, the extra having the choice's name."""


def preflight(
    cfg: DictConfig,
    *,
    ranks: int | None = None,
    components: Collection[str] = COMPONENTS,
) -> DictConfig:
    """Check a composed configuration and return it resolved.

    Values that the model supplies are set: `train.precision` where it is auto, `sample.guidance_scale` where it is
    null. A `train.micro_batch_size` of auto stays, until the device decides it.
    The `components` of these keys are imported, where `run.allowed_packages` has their packages, and their arguments
    are bound to their constructors, which check the values when assembly makes them.

    `cfg` is as composed by Hydra, and is not changed. Without `ranks`, the processes are those of torchrun, else 1.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if ranks is None else ranks
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=False)  # type: ignore[assignment]
    written = dict(leaves(plain))
    if missing := sorted(key for key, value in written.items() if value == "???"):
        rest = f" Also missing: {', '.join(missing[1:])}." if len(missing) > 1 else ""
        raise ConfigError(missing_message(missing[0], plain) + rest)
    root = OmegaConf.to_object(cfg)
    assert isinstance(root, Root)
    resolved = cfg.copy()
    OmegaConf.resolve(resolved)
    _check_typed(root, resolved)
    _check_components(root, components)
    _check_data_fits(root)
    _check_run(root)
    _check_libraries(resolved)
    _check_schedule_free(root, components)
    _check_post_hoc(root)
    _check_parallel(root, ranks)
    train = root.train
    own = None if train.micro_batch_size == AUTO else train.micro_batch_size
    micro = split_batch(train.global_batch_size, own, ranks)
    resolved.train.micro_batch_size = AUTO if train.micro_batch_size == AUTO else micro
    resolved.memory.budget_gb = root.memory.budget_gb
    resolved.train.precision = precision(root)
    if root.sample.guidance_scale is None:
        resolved.sample.guidance_scale = guidance_scale(root)
    return resolved


def _check_typed(root: Root, cfg: DictConfig) -> None:
    """Refuse keys that `+key=` added to a typed node, and numbers that pass comparisons of ranges without being one."""
    nodes = {"": root, **{f"{key}.": node for key, node in vars(root).items() if dataclasses.is_dataclass(node)}}
    for prefix, node in nodes.items():
        known = [field.name for field in dataclasses.fields(node)]
        if added := [key for key in vars(node) if key not in known]:
            raise ConfigError(f"{prefix}{added[0]} is unknown.{did_you_mean(added[0], known, prefix)}")
    for key, value in leaves(OmegaConf.to_container(cfg)):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value} must be a finite number. Where a thing can be switched off, null does.")


def _check_components(root: Root, keys: Collection[str]) -> None:
    """Check every component node against its class, and bind its arguments to the constructor."""
    allowed = None if root.run.allow_any_target else root.run.allowed_packages
    nodes = {key: getattr(root, key) for key in keys}
    for key, node in nodes.items():
        check_is_component(key, node)
    check_targets(nodes, allowed)
    _check_compatibility(root)
    for key, node in nodes.items():
        check_component(key, node, allowed, CONTRACTS)


def _check_compatibility(root: Root) -> None:
    """Check that task, objective and network go together with the stage, by constants of their classes.

    These are `Stage.name`, `abilities` and `noise_unit`; `Task.fits` and `reconstructs`; `Objective.denoises` and, of
    one that does not, `fits`; `NoiseCondition.unit`. What a class does not define is not compared.
    """
    if not all(is_component(node) for node in (root.model, root.task, root.objective)):
        return
    model, task = root.model["_target_"], root.task["_target_"]
    stage, fits, roles = class_constant(model, "name"), class_constant(task, "fits"), _roles(model)
    if stage is None or fits is None:
        return
    if not roles & {*fits}:
        tasks = [o for o, t in option_targets("task").items() if roles & {*(class_constant(t, "fits") or ())}]
        models = [o for o, t in option_targets("model").items() if _roles(t) & {*fits}]
        raise ConfigError(
            f"{chosen('task', task)} trains {', '.join(fits)}, but {chosen('model', model)} is {stage}. Tasks that fit "
            f"{stage}: {', '.join(tasks) or 'none yet'}; models that fit this task: {', '.join(models) or 'none yet'}."
        )
    _check_objective(root, fits, roles)


def _check_objective(root: Root, fits: Sequence[str], roles: set[str]) -> None:
    """Check that the objective scores what the task trains of the stage, and gives the network the noise it expects."""
    model, task, objective = (node["_target_"] for node in (root.model, root.task, root.objective))
    reconstructs = class_constant(task, "reconstructs")
    own = "fits" if class_constant(objective, "denoises") is False else "denoises"
    is_compared = None not in (reconstructs, class_constant(objective, own))
    condition, wanted = root.objective.get("noise_condition"), class_constant(model, "noise_unit")
    given = class_constant(condition["_target_"], "unit") if is_component(condition) else None
    if is_compared and not _scores(objective, roles, reconstructs):
        others = {o: _roles(t) for o, t in option_targets("model").items()}
        models = [o for o, r in others.items() if r & {*fits} and _scores(objective, r, reconstructs)]
        choice, instead = chosen("model", model), f" but {_list(models)}" if models else ""
        reason = (
            f"{chosen('task', task)} with {chosen('objective', objective)} does not train {choice} "
            f"({class_constant(model, 'name')}){instead}. For {choice}, choose"
        )
    elif wanted is not None and given not in (None, wanted):
        reason = (
            f"objective.noise_condition={condition['_target_'].rpartition('.')[2]} gives the network a {given} for "
            f"noise level, and that of {chosen('model', model)} was made for a {wanted}. Choose"
        )
    else:
        return
    conditions = {o: file.get("noise_condition") for o, file in option_files("objective").items()}
    units = {o: class_constant(node["_target_"], "unit") if node else None for o, node in conditions.items()}
    fitting = [
        option
        for option, target in option_targets("objective").items()
        if (wanted is None or units[option] in (None, wanted)) and _scores(target, roles, reconstructs or ())
    ]
    raise ConfigError(f"{reason} objective={_list(fitting) or '(none yet)'}.")


def _roles(model: str) -> set[str]:
    """Return what a task may name a stage by: its name, and its abilities."""
    return {str(class_constant(model, "name")), *(class_constant(model, "abilities") or ())}


def _scores(objective: str, roles: set[str], reconstructs: Sequence[str]) -> bool:
    """Return whether an objective scores what a task with these `reconstructs` trains of a stage with these roles."""
    fits = class_constant(objective, "fits")
    if class_constant(objective, "denoises"):
        return not roles & {*reconstructs} and (fits is None or bool(roles & {*fits}))
    return bool(reconstructs) and bool(roles & {*(fits or ())})


def _list(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _check_data_fits(root: Root) -> None:
    """Check what model and validation ask of the data."""
    own, wanted = root.data.get("image_size"), root.model.get("image_size")
    if own != wanted and isinstance(own, int) and isinstance(wanted, int):
        raise ConfigError(
            f"data.image_size={own} differs from model.image_size={wanted}. Set model.image_size; the data follows."
        )
    if root.validate.urls is not None and "urls" not in root.data:
        raise ConfigError(
            f"validate.urls={','.join(root.validate.urls)} are tars, and {root.data['_target_']} has no data.urls. Use "
            "data=webdataset, or hold out a share by validate.share."
        )
    listed, own_list = root.data.get("quarantine"), Path(root.run.dir).absolute()
    if isinstance(listed, str) and own_list in (Path(listed).absolute(), *Path(listed).absolute().parents):
        raise ConfigError(
            f"data.quarantine={listed} is this run's own list, which grows while it trains, so that a resumed run "
            "would see other samples. Start another run, by another run.name, that leaves the samples out."
        )


def _check_run(root: Root) -> None:
    """Check that the run has an end, and what it resumes from and goes back to."""
    if root.train.max_steps is None and root.train.max_epochs is None and root.data.get("num_examples_to_see") is None:
        raise ConfigError(
            "Nothing ends this run: set train.max_steps, train.max_epochs or data.num_examples_to_see, "
            "e.g. train.max_steps=10000."
        )
    begins = not is_run(Path(root.run.dir))  # one that goes on may have outlived the checkpoint that it began from
    if begins and root.run.resume not in {"auto", "never"} and not Path(root.run.resume).exists():
        raise ConfigError(
            f"run.resume={root.run.resume} must be auto, never, or the path of a checkpoint that exists. "
            "auto continues from the newest."
        )
    metric = root.checkpoint.best_metric or ""
    is_validated = root.validate.every_steps is not None or root.validate.every_epochs is not None
    if metric.startswith(("validate/", "validate_ema/")) and not is_validated:
        raise ConfigError(f"checkpoint.best_metric={metric} is never measured. Set validate.every_steps, e.g. 500.")


def _check_libraries(cfg: DictConfig) -> None:
    """Check that the libraries of chosen extras are installed."""
    for key, libraries in EXTRAS.items():
        choice = str(OmegaConf.select(cfg, key))
        if choice in libraries and importlib.util.find_spec(libraries[choice]) is None:
            raise ConfigError(
                f"{key}={choice} needs the library {libraries[choice]}, which is not installed. {install_hint(choice)}."
            )


def _check_schedule_free(root: Root, keys: Collection[str]) -> None:
    """Check that nothing else schedules or averages what an algorithm with `is_schedule_free` does itself."""
    if not {"optimizer", "lr_scheduler"} <= set(keys):
        return
    found = (each["_target_"] for key in keys for _, each in components_in(key, getattr(root, key)))
    target = next((each for each in found if class_constant(each, "is_schedule_free")), None)
    if target is None:
        return
    name, schedule = target.rpartition(".")[2], root.lr_scheduler["_target_"]
    if class_constant(schedule, "decays") is not False:
        raise ConfigError(
            f"{chosen('lr_scheduler', schedule)} lowers a learning rate that {name} needs constant: its average of the "
            "weights does what a schedule does. Set lr_scheduler=constant, with lr_scheduler.warmup_steps."
        )
    for key in ("decay", "post_hoc"):
        if (value := getattr(root.ema, key)) is not None:
            raise ConfigError(
                f"ema.{key}={value} would average weights that do not count: {name} averages them itself, and its "
                f"average is sampled, validated and exported. Set ema.{key}=null."
            )
    after_steps = root.objective.get("revive_after_steps") if "objective" in keys else None
    if after_steps is not None:
        raise ConfigError(
            f"objective.revive_after_steps={after_steps} would write codes that {name} takes back, since it "
            "steps weights of its own. Set objective.revive_after_steps=null, or choose another optimizer."
        )


def _check_post_hoc(root: Root) -> None:
    """Check that checkpoints from the whole run are kept, which post-hoc averages are built from."""
    kept = root.checkpoint
    if root.ema.post_hoc is not None and kept.keep_last is not None and kept.keep_every_steps is None:
        raise ConfigError(
            f"ema.post_hoc={root.ema.post_hoc} builds averages from checkpoints of all of the training, of which "
            f"checkpoint.keep_last={kept.keep_last} keeps the newest. Set checkpoint.keep_every_steps, e.g. to a "
            "sixteenth of the steps."
        )


def _check_parallel(root: Root, ranks: int) -> None:
    """Check that the ranks can form the mesh."""
    mode, shard = root.parallel.mode, root.parallel.shard_size
    if mode is ParallelMode.single and ranks > 1:
        raise ConfigError(
            f"parallel=single runs on one rank, but {ranks} were started: unsynchronised copies would train apart. "
            "Use parallel=auto, ddp or fsdp, or start one process."
        )
    if shard is not None and mode is not ParallelMode.hsdp:
        raise ConfigError(f"parallel.shard_size={shard} is for parallel=hsdp, not {mode}. Set it to null, or use hsdp.")
    if shard is not None and ranks % shard:
        raise ConfigError(f"parallel.shard_size={shard} does not divide the {ranks} ranks. Choose a divisor, or null.")


def split_batch(global_batch_size: int, micro_batch_size: int | None, ranks: int) -> int:
    """Return the micro-batch size of a global batch; without one there is no gradient accumulation."""
    if global_batch_size % ranks:
        raise ConfigError(
            f"train.global_batch_size={global_batch_size} cannot be split equally over {ranks} ranks. Sizes that fit "
            f"{ranks} ranks: {nearest_multiples(global_batch_size, ranks)}; numbers of ranks that fit "
            f"{global_batch_size}: {divisors(global_batch_size)}."
        )
    share = global_batch_size // ranks
    micro = share if micro_batch_size is None else micro_batch_size
    if share % micro:
        raise ConfigError(
            f"train.global_batch_size={global_batch_size} is not micro_batch_size x ranks x accumulation with "
            f"train.micro_batch_size={micro} and {ranks} rank{'s' if ranks > 1 else ''}. Micro-batch sizes that fit: "
            f"{divisors(share)}; global batch sizes that fit: {nearest_multiples(global_batch_size, micro * ranks)}."
        )
    return micro


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of `unit` just below and above `value`, 0 left out, as text."""
    below = value // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple)


def divisors(value: int) -> str:
    """Return the divisors of `value`, as text."""
    return ", ".join(str(d) for d in range(1, value + 1) if value % d == 0)


def precision(root: Root) -> Precision:
    """Return the precision of the run; auto follows the argument `model.precision`."""
    if root.train.precision is not Precision.auto:
        return root.train.precision
    own = root.model.get("precision")
    if own not in (Precision.bf16, Precision.fp32):
        reason = f"{root.model['_target_']} has no precision" if own is None else f"model.precision={own} is none"
        raise ConfigError(
            f"train.precision=auto takes that of the model, and {reason}. Set train.precision=bf16, or fp32 for small "
            "models; a stage of your own may have an argument precision for it."
        )
    return Precision(own)


def guidance_scale(cfg: Root | DictConfig) -> float | None:
    """Return the guidance of the stage's samples; None where nothing is sampled."""
    if class_constant(cfg.objective["_target_"], "denoises") is False:
        return None
    scale: float | None = class_constant(cfg.model["_target_"], "guidance_scale")
    return scale


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every plain value below a node."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for position, value in enumerate(node):
            yield from leaves(value, f"{path}[{position}]")
    else:
        yield path, node
