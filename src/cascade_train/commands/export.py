"""Write weights or adapters for other programs.

    cascade-train export from=runs/x format=original

From a run's checkpoint, or from any weights or adapters that the library reads. Formats live in models/formats/.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cascade_train.commands.parts.command_line import Command, listed
from cascade_train.commands.parts.models import WeightsArgs, print_error
from cascade_train.config.groups import did_you_mean
from cascade_train.config.saved import CONFIG_NAME, load_saved_config
from cascade_train.errors import ConfigError
from cascade_train.files.hub import HubSource, parse_source, push_folder
from cascade_train.files.run_folder import is_run, no_checkpoint_yet

COMBINED = "combined"
"""Format of Stage C, B and A in one folder, and its name in `out`."""

SINGLE_FILE = "single_file"
"""Format of a whole pipeline in one file."""

NETWORK = {
    "diffusers": "{part}",
    "original": "{part}.original.safetensors",
    SINGLE_FILE: "pipeline.safetensors",
}
LORA = {
    "peft": "lora",
    "single": "lora.safetensors",
    "comfyui": "lora.comfyui.safetensors",
    "kohya": "lora.kohya.safetensors",
    "original": "lora.original.safetensors",
}
"""Format -> what it is called in `out`; a network's part is prior (Stage C) or decoder (Stage B)."""


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
    out: str | None = None
    """Folder to write into; null = `<run>/export`, or `export` for anything else."""
    push: str | None = None
    """Repository of the hub, `user/name`, that gets what was written with its model card; null = nothing leaves."""
    private: bool = True
    """Whether a repository that `push` makes is private."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.formats():
            if name not in NETWORK | LORA | {COMBINED: COMBINED}:
                raise ConfigError(f"format={name} is unknown.{did_you_mean(name, [*(NETWORK | LORA), COMBINED])}")
        if self.push is not None and (parse_source(self.push) or HubSource("", None, "-")).repo != self.push:
            raise ConfigError(f"push={self.push} is no repository of the hub. Write it user/name.")
        self._check_combined()

    def _check_combined(self) -> None:
        if COMBINED not in self.formats():
            for key in ("decoder", "codec"):
                if getattr(self, key) is not None:
                    raise ConfigError(f"{key}={getattr(self, key)} is for format=combined; leave it out.")
        elif self.decoder is None or self.formats() != [COMBINED] or self.step is not None:
            raise ConfigError(
                "format=combined is written alone, of what a run exported, and needs a Stage B: "
                "from=<Stage C> decoder=<Stage B> format=combined, without step. Export a step first."
            )

    def formats(self) -> list[str]:
        """Return the formats asked for."""
        return listed(self.format)


def export(args: ExportArgs) -> int:
    """Write the formats asked for, read each back, print its relative error, push them if asked, and return 0.

    Raises:
        ConfigError: nothing at `from=`, no such checkpoint, or a format that is not of its kind.
        RunError: what was written reads back differently.
    """
    source = Path(args.source)
    of_run = (source / CONFIG_NAME).is_file() and (source / "checkpoints").is_dir()
    if is_run(source) and (reason := no_checkpoint_yet(source)):
        raise ConfigError(f"from={source}: {reason}")
    out = Path(args.out) if args.out is not None else source / "export" if of_run else Path("export")
    written: list[str] = []
    if args.formats() == [COMBINED]:
        _combine(args, out / COMBINED)
        written = [COMBINED]
    elif of_run:
        _export_checkpoint(args, source, out)
    elif not args.formats():
        raise ConfigError(f"from={source}: is no run with checkpoints; say what to write it as, e.g. format=original.")
    if args.formats() not in ([], [COMBINED]):
        written = _write_formats(args, str(out if of_run else source), out)
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

    found = partial(find_model, allow_any_target=args.allow_any_target)
    model = found(args.source, key="from", part="prior")
    decoder = found(str(args.decoder), key="decoder", part="decoder")
    if args.codec is not None:
        use_codec(decoder, args.codec)
    print_error(out, export_combined(model, decoder, dtype=args.dtype, out=out))


def _export_checkpoint(args: ExportArgs, run: Path, out: Path) -> None:
    cfg = load_saved_config(run, allow_any_target=args.allow_any_target)

    from cascade_train.results.export import export_checkpoint  # heavy: torch and everything above it

    checkpoint = export_checkpoint(cfg, run / "checkpoints", step=args.step, out=out)
    sys.stdout.write(f"{checkpoint.name} of {run} is exported to {out}\n")


def _write_formats(args: ExportArgs, source: str, out: Path) -> list[str]:
    others = [name for name in args.formats() if name != SINGLE_FILE]
    written = _single_file(args, source, out) if SINGLE_FILE in args.formats() else []
    return [*written, *(_convert(args, others, source, out) if others else [])]


def _single_file(args: ExportArgs, source: str, out: Path) -> list[str]:
    from cascade_train.models.formats.export import DTYPES
    from cascade_train.results.find import whole_pipeline  # heavy: torch and diffusers

    found, name = whole_pipeline(source), NETWORK[SINGLE_FILE]
    if found is None:
        raise ConfigError(
            f"format={SINGLE_FILE}: from={source} holds no pipeline that is written as one file. Name a run of "
            "task=finetune on a model that has one, its export, or a pipeline's folder."
        )
    family, folder, _ = found
    save, dtype = family.save_single_file, DTYPES.get(args.dtype or "")
    print_error(out / name, save(folder, out / name, dtype=dtype, title=_title(source)))
    return [name]


def _title(source: str) -> str:
    """Return what a file calls itself: the run, or the folder or file, that it was made from."""
    from cascade_train.results.find import run_of

    return (run_of(Path(source)) or Path(source)).absolute().stem


def _convert(args: ExportArgs, formats: list[str], source: str, out: Path) -> list[str]:
    from cascade_train.models.formats.export import DTYPES, network_config, save_network
    from cascade_train.models.formats.export_lora import export_lora
    from cascade_train.models.formats.lora_files import holds_lora, module_shapes, read_lora
    from cascade_train.models.formats.weights import load_state
    from cascade_train.results.find import stored_network  # heavy: torch and diffusers

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
    config = network_config(network)
    state = load_state(network, source, dtype=DTYPES.get(args.dtype or ""), key="from")
    has_pipeline = Path(source) == out and args.dtype is None  # a run's, where its network alone would go
    part = network.family.part_of(config)
    files = {name: names[name].format(part=part) for name in formats}
    for name, file in files.items():
        if not (has_pipeline and name == "diffusers"):
            print_error(out / file, save_network(network.family, state, config, out / file, format=name))
    return list(files.values())


COMMAND = Command(arguments=ExportArgs, run=export, shows_log=True)
