"""Write weights or adapters for other programs.

cascade-train export from=runs/x format=original
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cascade_train.commands.parts.command_line import Command, listed
from cascade_train.commands.parts.models import WeightsArgs, print_error
from cascade_train.config.groups import did_you_mean
from cascade_train.config.limits import check_length
from cascade_train.config.saved import CONFIG_NAME, load_saved_config
from cascade_train.errors import ConfigError
from cascade_train.files.hub import HubSource, parse_source, push_folder
from cascade_train.files.run_folder import is_run, no_checkpoint_yet

COMBINED, SINGLE_FILE = "combined", "single_file"
"""Formats of Stage C, B and A in one folder of this name, and of a whole pipeline in one file."""
NETWORK = {"diffusers": "{part}", "original": "{part}.original.safetensors", SINGLE_FILE: "pipeline.safetensors"}
LORA = {"peft": "lora", "single": "lora.safetensors"} | {
    name: f"lora.{name}.safetensors" for name in ("comfyui", "kohya", "original")
}
"""Format -> its name in `out`; a network's part is prior (Stage C) or decoder (Stage B)."""


@dataclass(kw_only=True)
class ExportArgs(WeightsArgs):
    """Write weights or adapters for other programs."""

    source: str
    """A run, or weights or adapters in any format that is read: an export, a folder, a file, a hub id."""
    format: Any = None
    """Formats to write, one or a list. Weights: diffusers, original; single_file, a whole pipeline in one.
    Adapters: peft, single, comfyui, kohya, original.
    combined, alone: Stage C with decoder=…, for diffusers' combined pipeline.
    null = what a run leaves by itself: diffusers, or peft with a single file in it."""
    decoder: str | None = None
    """For format=combined, Stage B with its Stage A: a run, its export, or published weights."""
    codec: str | None = None
    """For format=combined, Stage A instead of that under Stage B: a run, its export, or weights."""
    step: int | None = None
    """Checkpoint of the run to export; null = the newest whole one."""
    average: float | None = None
    """Length of an average of the weights up to there, built from what ema.post_hoc keeps: a standard deviation of the
    steps averaged, relative to all steps, e.g. 0.12; null = that of ema.decay, else the weights."""
    out: str | None = None
    """Folder to write into; null = `<run>/export`, or `export` for anything else."""
    push: str | None = None
    """Repository of the hub, `user/name`, that gets what was written with its model card; null = nothing leaves."""
    private: bool = True
    """Whether a repository that `push` makes is private."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [*(NETWORK | LORA), COMBINED]
        for name in self.formats():
            if name not in known:
                raise ConfigError(f"format={name} is unknown.{did_you_mean(name, known)}")
        if self.push is not None and (parse_source(self.push) or HubSource("", None, "-")).repo != self.push:
            raise ConfigError(f"push={self.push} is no repository of the hub. Write it user/name.")
        if COMBINED not in self.formats():
            for key in ("decoder", "codec"):
                if getattr(self, key) is not None:
                    raise ConfigError(f"{key}={getattr(self, key)} is for format=combined; leave it out.")
        elif self.decoder is None or self.formats() != [COMBINED] or (self.step, self.average) != (None, None):
            raise ConfigError(
                "format=combined is written alone, of what a run exported, and needs a Stage B: from=<Stage C> "
                "decoder=<Stage B> format=combined, without step and average. Export a step first."
            )
        if self.average is not None:
            check_length("average", self.average)

    def formats(self) -> list[str]:
        """Return the formats asked for."""
        return listed(self.format)


def export(args: ExportArgs) -> int:
    """Write the formats asked for, read each back, print its relative error, push them if asked, and return 0.

    Raises:
        ConfigError: nothing at `from=`, no such checkpoint, or a format that is not of its kind.
        RunError: what was written reads back differently.
    """
    source, formats = Path(args.source), args.formats()
    of_run = (source / CONFIG_NAME).is_file() and (source / "checkpoints").is_dir()
    if is_run(source) and (reason := no_checkpoint_yet(source)):
        raise ConfigError(f"from={source}: {reason}")
    out = Path(args.out) if args.out is not None else source / "export" if of_run else Path("export")
    if args.average is not None and not of_run:
        raise ConfigError(f"average={args.average}: from={source} is no run with checkpoints, of which one is built.")
    if formats == [COMBINED]:
        _combine(args, out / COMBINED)
    elif of_run:
        cfg = load_saved_config(source, allow_any_target=args.allow_any_target)

        from cascade_train.distributed.process_group import process_group  # heavy: torch and everything above it
        from cascade_train.results.export import export_checkpoint

        with process_group() as world:
            checkpoints = source / "checkpoints"
            checkpoint = export_checkpoint(cfg, checkpoints, world, step=args.step, average=args.average, out=out)
        sys.stdout.write(f"{checkpoint.name} of {source} is exported to {out}\n")
    elif not formats:
        raise ConfigError(f"from={source}: is no run with checkpoints; say what to write it as, e.g. format=original.")
    read, others = str(out if of_run else source), [name for name in formats if name not in (SINGLE_FILE, COMBINED)]
    written = [COMBINED] if formats == [COMBINED] else []
    written += _single_file(args, read, out) if SINGLE_FILE in formats else []
    written += _convert(args, others, read, out) if others else []
    _finish(args, out, written, all_of_run=of_run)
    return 0


def _finish(args: ExportArgs, out: Path, written: list[str], *, all_of_run: bool) -> None:
    """Write the model card of what lies in `out` now, of a run all of it, and push it where `push` is set."""
    from cascade_train.assembly.components import families
    from cascade_train.assembly.model_card import CARD, SAMPLES, write_card
    from cascade_train.results.find import run_of

    known = dict.fromkeys(name for family in families() for name in family.uses)
    names = [name for name in known if name in written or (all_of_run and (out / name).exists())]
    if written:
        write_card(out, names, source=args.source, run=run_of(Path(args.source)), step=args.step)
    if args.push is not None:
        patterns = [CARD, SAMPLES, CONFIG_NAME, *names, *(f"{name}/*" for name in names), "*.embeddings/*"]
        sys.stdout.write(f"Pushed to {push_folder(out, args.push, private=args.private, names=patterns)}\n")


def _combine(args: ExportArgs, out: Path) -> None:
    from cascade_train.results.export import export_combined  # heavy: torch and diffusers
    from cascade_train.results.find import find_model, use_codec

    is_trusted = args.allow_any_target
    model = find_model(args.source, key="from", part="prior", allow_any_target=is_trusted)
    decoder = find_model(str(args.decoder), key="decoder", part="decoder", allow_any_target=is_trusted)
    if args.codec is not None:
        use_codec(decoder, args.codec)
    print_error(out, export_combined(model, decoder, dtype=args.dtype, out=out))


def _single_file(args: ExportArgs, source: str, out: Path) -> list[str]:
    from cascade_train.models.formats.export import DTYPES  # heavy: torch and diffusers
    from cascade_train.results.find import whole_pipeline

    found, name = whole_pipeline(source), NETWORK[SINGLE_FILE]
    if found is None:
        raise ConfigError(
            f"format={SINGLE_FILE}: from={source} holds no pipeline that is written as one file. Name a run of "
            "task=finetune on a model that has one, its export, or a pipeline's folder."
        )
    family, folder, _ = found
    dtype = DTYPES.get(args.dtype or "")
    print_error(out / name, family.save_single_file(folder, out / name, dtype=dtype, title=_title(source)))
    return [name]


def _title(source: str) -> str:
    """Return the title of a file: the name of the run, folder or file that it was made from."""
    from cascade_train.results.find import run_of

    return (run_of(Path(source)) or Path(source)).absolute().stem


def _convert(args: ExportArgs, formats: list[str], source: str, out: Path) -> list[str]:
    from cascade_train.models.formats.export import DTYPES, save_network  # heavy: torch and diffusers
    from cascade_train.models.formats.export_lora import export_lora
    from cascade_train.models.formats.lora_files import holds_lora, module_shapes, read_lora
    from cascade_train.models.formats.weights import load_state
    from cascade_train.results.find import stored_network

    network = stored_network(source, model=args.model, key="from", allow_any_target=args.allow_any_target)
    is_lora = holds_lora(source)
    names = LORA if is_lora else NETWORK
    for name in formats:
        if name not in names:
            kind = "adapters" if is_lora else "a network's weights"
            raise ConfigError(f"format={name}: from={source} holds {kind}, whose formats are {', '.join(names)}.")
    if is_lora:
        modules, filters = module_shapes(network), args.module_filters
        lora = read_lora(source, key="from", family=network.family, modules=modules, module_filters=filters)
        for name in formats:
            path = out / names[name]
            print_error(path, export_lora(lora, network, path, format=name, metadata={}, title=_title(source)))
        return [names[name] for name in formats]
    config = dict(network.config)
    state = load_state(network, source, dtype=DTYPES.get(args.dtype or ""), key="from")
    has_pipeline = Path(source) == out and args.dtype is None  # a run's, where its network alone would go
    files = {name: names[name].format(part=network.family.part_of(config)) for name in formats}
    for name, file in files.items():
        if not (has_pipeline and name == "diffusers"):
            print_error(out / file, save_network(network.family, state, config, out / file, format=name))
    return list(files.values())


COMMAND = Command(arguments=ExportArgs, run=export, shows_log=True)
