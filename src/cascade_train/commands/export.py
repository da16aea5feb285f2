"""Write weights or adapters for other programs.

cascade-train export from=runs/x format=original
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cascade_train.commands.parts.command_line import Command, listed
from cascade_train.commands.parts.models import WeightsArgs
from cascade_train.config.groups import did_you_mean
from cascade_train.config.saved import CONFIG_NAME
from cascade_train.errors import ConfigError
from cascade_train.files.hub import HubSource, parse_source
from cascade_train.files.run_folder import is_run, no_checkpoint_yet
from cascade_train.models.formats.weights_source import (
    LORA_FILES,
    NETWORK_FILES,
    SINGLE_FILE,
    SINGLE_FILE_SUFFIXES,
    local_path,
)
from cascade_train.options import check_choice, check_length

OF_CHECKPOINT = ("step", "weights", "average")


@dataclass(kw_only=True)
class ExportArgs(WeightsArgs):
    """Write weights or adapters for other programs."""

    source: str
    """A run, or weights or adapters in any format that is read: an export, a folder, a file, a hub id."""
    format: Any = None
    """Formats to write, one or a list. Weights: diffusers, original; single_file, a whole pipeline in one.
    Adapters: peft, comfyui, kohya, original.
    null = what a run leaves by itself: diffusers, or peft."""
    step: int | None = None
    """Checkpoint of the run to export; null = the newest whole one."""
    weights: str | None = None
    """Of a run with ema.decay: trained = the weights themselves, average = their average; null = the average, if there
    is one."""
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
        known = NETWORK_FILES | LORA_FILES
        for name in self.formats():
            if name not in known:
                raise ConfigError(f"format={name} is unknown.{did_you_mean(name, known)}")
        if self.dtype is not None and not self.formats():
            raise ConfigError(
                f"dtype={self.dtype}: is for what format= names. Add format=original for a network's weights; adapters"
                " are written in fp32."
            )
        if self.out is not None and Path(self.out).suffix.lower() == ".safetensors":
            raise ConfigError(f"out={self.out} names a folder, whose files are named after their formats.")
        if self.push is not None and (parse_source(self.push) or HubSource("", None, "-")).repo != self.push:
            raise ConfigError(f"push={self.push} is no repository of the hub. Write it user/name.")
        if self.average is not None:
            check_length("average", self.average)
        if self.weights is not None:
            check_choice("weights", self.weights, ("trained", "average"))
        if self.weights is not None and self.average is not None:
            raise ConfigError(f"weights={self.weights}, average={self.average}: name one of the two.")

    def formats(self) -> list[str]:
        """Return the formats asked for."""
        return listed(self.format)


def _is_run_to_export(args: ExportArgs, source: Path) -> bool:
    """Return whether `source` is a run with checkpoints; a ConfigError where `args` ask what only one has."""
    of_run = (source / CONFIG_NAME).is_file() and (source / "checkpoints").is_dir()
    on_hub = parse_source(args.source)
    is_name = on_hub is not None and (on_hub.inside or not args.source.endswith(SINGLE_FILE_SUFFIXES))
    if not local_path(args.source).exists() and (not is_name or Path(source.parts[0]).is_dir()):
        raise ConfigError(f"from={source}: no such file or folder; name a run, weights or adapters.")
    if is_run(source) and (reason := no_checkpoint_yet(source)):
        raise ConfigError(f"from={source}: {reason}")
    for key in OF_CHECKPOINT:
        if getattr(args, key) is not None and not of_run:
            raise ConfigError(f"{key}={getattr(args, key)}: is for a run with checkpoints; from={source} is none.")
    if not (args.formats() or of_run):
        raise ConfigError(f"from={source}: is no run with checkpoints; say what to write it as, e.g. format=original.")
    return of_run


def export(args: ExportArgs) -> int:
    """Write the formats asked for, read each back, print its relative error, push them if asked, and return 0.

    Raises:
        ConfigError: nothing at `from=`, no such checkpoint, or a format that is not of its kind.
        RunError: what was written reads back differently.
    """
    source, formats, trusted = Path(args.source), args.formats(), args.allow_any_target
    of_run = _is_run_to_export(args, source)
    from cascade_train.results import export as exports  # heavy: torch and everything above it

    out = Path(args.out) if args.out is not None else source / "export" if of_run else Path("export")
    read, written = str(out if of_run else source), list[str]()
    is_own = of_run and out.resolve() == (source / "export").resolve()
    rule = {"of_run": of_run, "is_own": is_own, "overwrite": args.overwrite}
    exports.check_replaceable(out, formats, inputs=[] if of_run else [args.source], **rule)
    if of_run:
        if formats:
            exports.check_run(source, formats, model=args.model, dtype=args.dtype, allow_any_target=trusted)
        of_checkpoint = {key: getattr(args, key) for key in OF_CHECKPOINT}
        exports.export_run(source, out, **of_checkpoint, allow_any_target=trusted)
    if SINGLE_FILE in formats:
        written += exports.export_single_file(read, out, dtype=args.dtype)
    if others := [name for name in formats if name != SINGLE_FILE]:
        of_weights = {key: getattr(args, key) for key in ("model", "module_filters", "dtype", "allow_any_target")}
        written += exports.convert(read, others, out, **of_weights)
    of_card = {key: getattr(args, key) for key in ("source", "step", "push", "private")}
    exports.write_card_of(out, written, all_of_run=of_run, **of_card)
    return 0


COMMAND = Command(arguments=ExportArgs, run=export, shows_log=True)
