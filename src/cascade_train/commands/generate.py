"""Generate images with trained stages.

cascade-train generate from=runs/lora-c_tiny prompts=[…]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascade_train.commands.parts.command_line import Command, listed
from cascade_train.commands.parts.models import SamplingArgs, find_stages
from cascade_train.data.prompts import read_prompts
from cascade_train.errors import ConfigError
from cascade_train.files.output import check_output
from cascade_train.files.run_folder import make_folder
from cascade_train.options import limit

if TYPE_CHECKING:
    from PIL.Image import Image

START_STRENGTH = 0.8
"""Noise level of start images, as in the original's image_to_image.ipynb."""


@dataclass(kw_only=True)
class GenerateArgs(SamplingArgs):
    """Generate images with trained stages; null = as the run's sample.* keys say."""

    prompts: Any = field(default_factory=list)
    """Prompts, a list, or @file with one in each line (txt) or row (csv, tsv, jsonl, parquet; @file:column); each gives
    `count` images. [] = no text, `count` images for each picture given below."""
    out: str = "generated"
    """Folder that the images go to, numbered on from those in it."""
    count: int = 1
    """Images per prompt."""
    image: Any = None
    """A picture, or a list with one for each prompt: for control networks, whose map the images follow; for Stage B,
    what it reconstructs."""
    control: Any = None
    """For control networks, instead of image: the map itself as a picture, white for 1."""
    strength: float = 1.0
    """Factor of the control residuals; 0 = none."""
    start_image: Any = None
    """A picture, or one for each prompt, that Stage C starts from (image-to-image)."""
    start_strength: float | None = None
    """Noise level of start_image, also the share of the steps taken; 1 = noise alone, all steps; null = 0.8."""
    variation: Any = None
    """A picture, or one for each prompt, whose CLIP embedding is a condition of Stage C beside the prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prompts = read_prompts(self.prompts)
        pictures = {key: listed(getattr(self, key)) for key in ("image", "control", "start_image", "variation")}
        if not self.prompts:
            self.prompts = [""] * max(map(len, pictures.values()))
        if not self.prompts:
            raise ConfigError("prompts=[] names nothing to draw, e.g. 'prompts=[\"a small red circle\"]'.")
        limit(self, "", "count", least=1)
        self._check_pictures(pictures)

    def _check_pictures(self, pictures: dict[str, list[str]]) -> None:
        if self.image is not None and self.control is not None:
            raise ConfigError("image and control both say what the images follow; give one of them.")
        followed = pictures["image"] or pictures["control"]
        if self.strength < 0 or (self.strength != 1.0 and not followed):
            raise ConfigError(f"strength={self.strength} must be 0 or more, and is for image=… or control=….")
        for given in pictures.values():
            if len(given) not in (0, 1, len(self.prompts)):
                raise ConfigError(f"{len(given)} images for {len(self.prompts)} prompts; give one, or one for each.")
        if self.start_strength is not None and (self.start_image is None or not 0.0 < self.start_strength <= 1.0):
            raise ConfigError(
                f"start_strength={self.start_strength} must be above 0, at most 1, and is for start_image=…."
            )
        for key, given in pictures.items():
            if missing := [path for path in given if not Path(path).expanduser().exists()]:
                raise ConfigError(f"{key}={missing[0]}: there is no such file.")


def generate(args: GenerateArgs) -> int:
    """Write the images into `out`, and return 0."""
    images, written = sampled(args, args.out)
    sys.stdout.write(f"{len(images)} images {written}\n")
    return 0


def sampled(args: GenerateArgs, out: str | None) -> tuple[list[Image], str]:
    """Images, `count` of each prompt after those of the one before it, and what was written.

    In a folder `out` each becomes `<prompt number>_<image number>.png`, and all a labelled `grid.png`, with numbers
    above those that are there; None = no files.
    """
    from cascade_train.distributed.process_group import process_group  # heavy: torch and everything above it
    from cascade_train.engine.sampling import to_images
    from cascade_train.results import sampling

    model, decoder = find_stages(args)
    if args.variation is not None and model.cfg.model.get("image_encoder") is None:
        raise ConfigError(
            f"variation={args.variation}: {model.origin} has no image encoder (model.image_encoder), so that no "
            "image's embedding is a condition of it. Use a Stage C with one, such as c_1b or c_3b, or start_image=…."
        )
    sizes = sampling.fit_sizes(model, decoder, height=args.height, width=args.width, compression=args.compression)
    files = sampling.GuideFiles(
        key="image" if args.control is None else "control",
        paths=listed(args.image) or listed(args.control),
        strength=args.strength,
        starts=listed(args.start_image),
        start_strength=START_STRENGTH if args.start_strength is None else args.start_strength,
        variations=listed(args.variation),
        size=sizes.sampled,
        side=model.cfg.model.image_size,
    )
    batches = sampling.batches_of(args.prompts, files, count=args.count, batch_size=args.batch_size)
    folder = None if out is None else Path(out).expanduser()
    if folder is not None:
        check_output(folder, "generate", is_folder=True, overwrite=True)  # which replaces nothing
        make_folder(folder)
    images: list[Image] = []
    with process_group() as world:
        save: sampling.Save = lambda _, image_BCHW: images.extend(to_images(image_BCHW))  # noqa: E731
        sampling.sample_images(model, decoder, batches, save, sizes=sizes, seed=args.seed, world=world)
    if folder is None:
        return images, ""
    first, grid = sampling.write_images(images, args.prompts, folder)
    return images, f"from {first.name} on, and {grid.name}, lie in {out}"


COMMAND = Command(arguments=GenerateArgs, run=generate)
