"""Merge LoRAs into weights.

cascade-train merge from=runs/base lora=[runs/a] strength=[0.8] out=merged
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cascade_train.commands.parts.command_line import Command, listed
from cascade_train.commands.parts.models import WeightsArgs
from cascade_train.errors import ConfigError
from cascade_train.files.output import check_output


@dataclass(kw_only=True)
class MergeArgs(WeightsArgs):
    """Merge LoRAs into weights."""

    source: str
    """Weights to merge into: a run, a diffusers folder, a file, a hub id."""
    lora: Any
    """Adapters to merge, one or a list, in any format that is read: runs, peft folders, files."""
    out: str
    """What to write: a name that ends in .safetensors = the original's single file, else a diffusers network folder."""
    strength: Any = 1.0
    """How much of each: a number for all, or a list in their order; 1 = as trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sources, strengths = listed(self.lora), self.strengths()
        if not sources:
            raise ConfigError("lora=[] names nothing to merge, e.g. lora=[runs/mine].")
        if len(strengths) != len(sources) or not all(isinstance(each, int | float) for each in strengths):
            raise ConfigError(f"strength={self.strength} must be a number, or have one for each of lora={sources}.")

    def strengths(self) -> list[float]:
        """Return one strength for each adapter."""
        return self.strength if isinstance(self.strength, list) else [self.strength] * len(listed(self.lora))


def merge(args: MergeArgs) -> int:
    """Write the merged weights, read them back, print the relative error, and return 0."""
    out, loras = Path(args.out).expanduser(), listed(args.lora)
    check_output(
        out,
        "merge",
        is_folder=out.suffix != ".safetensors",
        overwrite=args.overwrite,
        inputs=[args.source, *loras],
        names=("config.json", "diffusion_pytorch_model*"),
    )
    from cascade_train.results import export as exports  # heavy: torch and everything above it

    of_weights = {key: getattr(args, key) for key in ("model", "module_filters", "dtype", "allow_any_target")}
    exports.merge(args.source, loras, args.strengths(), out, **of_weights)
    return 0


COMMAND = Command(arguments=MergeArgs, run=merge, shows_log=True)
