"""Make pictures with trained stages, or reconstruct them, and measure them.

cascade-train evaluate from=runs/x prompts=@captions.csv real=photos features=inception.pth clip=clip-vit-l
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascade_train.commands.parts.command_line import Command, listed
from cascade_train.commands.parts.models import SamplingArgs, find_stages
from cascade_train.config.saved import load_saved_config
from cascade_train.data.prompts import read_prompts
from cascade_train.errors import ConfigError
from cascade_train.options import check_choice, limit

if TYPE_CHECKING:
    from cascade_train.results.evaluation.result import Evaluation


@dataclass(kw_only=True)
class EvaluateArgs(SamplingArgs):
    """Make pictures with a Stage C, or reconstruct pictures with a Stage B or A, and measure them.

    Continues where it was killed. Sampling is as the run's sample.* keys say where nothing is given.
    """

    source: str | None = None  # type: ignore[assignment]
    """Stage that is evaluated: a run, its export, or published weights."""
    watch: str | None = None
    """Instead of from: a run whose checkpoints are evaluated as they appear, until it has finished."""
    checkpoint: int | None = None
    """Step of a checkpoint of the run to evaluate; null = its export."""
    prompts: Any = field(default_factory=list)
    """For a Stage C: a list, or @file with one in each line (txt) or row (csv, tsv, jsonl, parquet; @file:column); [] =
    the captions of the real pictures."""
    count: int = 1
    """Images per prompt."""
    samples: int | None = None
    """How many prompts, the first ones, or real pictures, drawn by the seed, images are made of; null = all."""
    real: Any = None
    """Real pictures to compare with, or to reconstruct: a folder, tables (csv, tsv, jsonl, parquet) or tars, one or a
    list; null = those that the run held out."""
    real_samples: int | None = None
    """How many of them, drawn by the seed; null = all."""
    features: str | None = None
    """File of FID's Inception V3, for FID, KID, precision and recall, of a Stage B or A rFID; package:tiny = the tiny
    cascade's compressor in its place, to compare tiny models; null = not measured, but of a Stage C without clip: the
    file that `download inception` left, of a tiny one package:tiny."""
    resize: str = "clean"
    """How pictures are resized for it: clean (antialiased, as clean-fid), or tf1 (as torch-fidelity, validate.rfid)."""
    clip: str | None = None
    """Folder of a CLIP of transformers, for CLIPScore; null = not measured."""
    lpips: str | None = None
    """File of torchvision's VGG-16, for LPIPS of a Stage B or A; null = not measured."""
    out: str | None = None
    """Folder of pictures and numbers; null = `<run>/evaluation/step_<n>`, or `evaluation` for anything else. A watch
    makes a step_<n> in it."""
    track: bool = True
    """Add the numbers to the run's tracker, too."""
    max_wait_hours: float | None = 12.0
    """A watch ends after so long without a new checkpoint; null = no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.source is None) == (self.watch is None):
            raise ConfigError("evaluate needs from=<a run, export or weights>, or watch=<a run>, and not both.")
        if self.checkpoint is not None and self.watch is not None:
            raise ConfigError(f"checkpoint={self.checkpoint}: is for from=; watch= evaluates all. Leave it out.")
        check_choice("resize", self.resize, ("clean", "tf1"))
        limit(self, "", "count", "samples", "real_samples", least=1)
        limit(self, "", "max_wait_hours", above=0.0)
        self.prompts = read_prompts(self.prompts)

    def settings(self) -> dict[str, Any]:
        """Arguments of `Settings`."""
        keys = ("count", "samples", "real_samples", "seed", "batch_size", "height", "width", "compression")
        values = {key: getattr(self, key) for key in (*keys, "features", "resize", "clip", "lpips")}
        return {**values, "prompts": tuple(self.prompts), "real": tuple(listed(self.real))}


def evaluate(args: EvaluateArgs) -> int:
    """Evaluate, and return 0; raises as `evaluation`."""
    evaluation(args)
    return 0


def evaluation(args: EvaluateArgs) -> Evaluation | None:
    """Sample what is missing, measure, print and keep the numbers; return them, None of a watch.

    Raises:
        ConfigError: no trained stage where one is named, settings that do not fit it, or nothing to compare with.
    """
    from cascade_train.results.evaluation import watch  # heavy: torch and everything above it

    key, source = ("from", str(args.source)) if args.watch is None else ("watch", args.watch)
    if args.watch is not None:
        watch.wait_for_run(Path(args.watch), max_wait_hours=args.max_wait_hours)
    run, out = watch.find_run(Path(source)), None if args.out is None else Path(args.out)
    if args.watch is None and args.checkpoint is None:
        model, decoder = find_stages(args)
        stages = watch.Stages(model=model, decoder=decoder, run=run, out=out, track=args.track)
        return stages.evaluate_weights(args.settings())
    if run is None:
        raise ConfigError(f"{key}={source}: is no run. Name the folder of a run.")
    cfg = load_saved_config(run, allow_any_target=args.allow_any_target, key=key)
    model, decoder = find_stages(args, f"{key}={run}", cfg)
    stages = watch.Stages(model=model, decoder=decoder, run=run, out=out, track=args.track)
    return stages.evaluate_checkpoints(args.settings(), args.checkpoint, args.max_wait_hours)


COMMAND = Command(arguments=EvaluateArgs, run=evaluate, many_ranks=True)
