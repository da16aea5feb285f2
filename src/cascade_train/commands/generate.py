"""Generate images with trained stages.

    cascade-train generate from=runs/lora-c_tiny prompts=[…]

How stages follow each other lives in results/paint.py, sampling in diffusion/.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from cascade_train.commands.parts.command_line import Command, listed
from cascade_train.config.preflight import guidance_scale, preflight
from cascade_train.config.schema import limit
from cascade_train.errors import ConfigError

if TYPE_CHECKING:
    from cascade_train.results.find import TrainedModel
    from cascade_train.results.paint import Order


DECODER_STEPS = 10
"""Network evaluations of Stage B for each picture, as in the original's text_to_image.ipynb."""

START_STRENGTH = 0.8
"""Noise level of start images, as in the original's image_to_image.ipynb."""


@dataclass(kw_only=True)
class GenerateArgs:
    """Generate images with trained stages; null = as the run's sample.* keys say."""

    source: str
    """Stage that samples: a run, its export, or published weights; Stage C alone shows previews, quickly."""
    decoder: str | None = None
    """Stage B, with its Stage A, that decodes the latents of Stage C: a run, its export, or published weights."""
    codec: str | None = None
    """Stage A instead of the one that Stage B was trained with: a run, its export, or weights."""
    prompts: list[str] = field(default_factory=list)
    """Prompts; each gives `count` images. [] = no text, `count` images for each picture given below."""
    out: str = "generated"
    """Folder that the images go to."""
    count: int = 1
    """Images per prompt."""
    seed: int = 0
    """Seed of the starting noise; an image depends on it, on the prompt and on the image's number."""
    height: int | None = None
    """Of the finished picture, in pixels; null = as the model was trained."""
    width: int | None = None
    """As height."""
    compression: float | None = None
    """Pixels of the finished picture for each of Stage C's latents; null = the model's, 42.67 for published ones."""
    sampler: str | None = None
    """ddpm, ddim or lcm."""
    steps: int | None = None
    """Network evaluations per image."""
    guidance_scale: float | None = None
    """Classifier-free guidance; 1 = none."""
    shift: float | None = None
    """logSNR shift of the sampling schedule; 1 = none."""
    decoder_steps: int | None = None
    """Network evaluations of Stage B per image, for decoder=…; null = 10."""
    decoder_guidance_scale: float | None = None
    """Classifier-free guidance of Stage B, for decoder=…; null = 1.1."""
    batch_size: int = 8
    """Images denoised at once; does not change them."""
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
    allow_any_target: bool = False
    """Build whatever classes the folder's configuration names, as for components of your own; trust it first."""

    def __post_init__(self) -> None:
        pictures = {key: listed(getattr(self, key)) for key in ("image", "control", "start_image", "variation")}
        if not self.prompts:
            self.prompts = [""] * max(map(len, pictures.values()))
        if not self.prompts:
            raise ConfigError("prompts=[] names nothing to draw, e.g. 'prompts=[\"a small red circle\"]'.")
        limit(self, "", "count", "batch_size", "decoder_steps", "height", "width", least=1)
        if self.compression is not None and not 1.0 <= self.compression < math.inf:
            raise ConfigError(f"compression={self.compression} must be 1 or more, e.g. 42.67.")
        self._check_pictures(pictures)
        self._check_decoder()

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

    def _check_decoder(self) -> None:
        scale = self.decoder_guidance_scale
        if scale is not None and not 0.0 <= scale < math.inf:
            raise ConfigError(f"decoder_guidance_scale={scale} must be 0 or more; 1 = none.")
        for key in ("decoder_steps", "decoder_guidance_scale"):
            if self.decoder is None and getattr(self, key) is not None:
                raise ConfigError(f"{key}={getattr(self, key)} is for decoder=…; without one, leave it out.")


def generate(args: GenerateArgs) -> int:
    """Write `<prompt number>_<image number>.png` and a labelled `grid.png` into `out`; return 0.

    Raises:
        ConfigError: no trained stage where one is named, or arguments that it refuses.
    """
    from cascade_train.distributed.process_group import process_group
    from cascade_train.engine.sampling import compose_grid
    from cascade_train.results.find import find_model, use_codec
    from cascade_train.results.paint import fit_sizes, paint, paint_cascade  # heavy: torch and everything above it

    found = partial(find_model, allow_any_target=args.allow_any_target)
    model = found(args.source, key="from", part="network")
    override_sampling(model.cfg, args)
    decoder = None if args.decoder is None else found(args.decoder, key="decoder", part="decoder")
    if decoder is not None:
        set_decoding(decoder.cfg, args)
    if args.codec is not None:
        use_codec(decoder or model, args.codec)
    refuse_variation(model, args)
    given = {key: getattr(args, key) for key in ("height", "width", "compression")}
    sizes = fit_sizes(model, decoder, **given)
    orders = make_orders(args, sizes.painted, model.cfg.model.image_size)
    with process_group() as world:
        out = make_folder(args.out)
        if decoder is None:
            images = paint(model, orders, sizes=sizes, seed=args.seed, world=world)
        else:
            images = paint_cascade(model, decoder, orders, sizes=sizes, seed=args.seed, world=world)
    for place, image in enumerate(images):
        image.save(out / f"{place // args.count:02d}_{place % args.count:02d}.png")
    columns = {f"image {number}": images[number :: args.count] for number in range(args.count)}
    compose_grid(args.prompts, columns).save(out / "grid.png")
    sys.stdout.write(f"{len(images)} images and grid.png lie in {out}\n")
    return 0


def make_orders(args: GenerateArgs, size: tuple[int, int], side: int) -> Iterator[Order]:
    """Yield batches to sample, with their pictures cropped to `size`, those of variations to squares of `side`."""
    from cascade_train.results.paint import GuideFiles, Order

    files = GuideFiles(
        key="image" if args.control is None else "control",
        paths=listed(args.image if args.control is None else args.control),
        strength=args.strength,
        starts=listed(args.start_image),
        start_strength=START_STRENGTH if args.start_strength is None else args.start_strength,
        variations=listed(args.variation),
        size=size,
        side=side,
    )
    jobs = [(prompt, number) for prompt in range(len(args.prompts)) for number in range(args.count)]
    for start in range(0, len(jobs), args.batch_size):
        prompts, numbers = zip(*jobs[start : start + args.batch_size], strict=True)
        captions = tuple(args.prompts[prompt] for prompt in prompts)
        yield Order(captions=captions, numbers=numbers, guide=files.guide(prompts, numbers))


def override_sampling(cfg: DictConfig, args: GenerateArgs) -> None:
    """Override the run's sampling settings with the arguments given, and check them."""
    for key in ("sampler", "steps", "guidance_scale", "shift"):
        if getattr(args, key) is not None:
            cfg.sample[key] = getattr(args, key)
    preflight(cfg, ranks=1)


def set_decoding(cfg: DictConfig, args: GenerateArgs) -> None:
    """Set the sampling of Stage B from its arguments, by default as in the original."""
    cfg.sample.steps = DECODER_STEPS if args.decoder_steps is None else args.decoder_steps
    given = args.decoder_guidance_scale
    cfg.sample.guidance_scale = guidance_scale(cfg) if given is None else given


def refuse_variation(model: TrainedModel, args: GenerateArgs) -> None:
    """Check that an image's embedding is a condition of the stage, where one is given."""
    if args.variation is not None and model.cfg.model.get("image_encoder") is None:
        raise ConfigError(
            f"variation={args.variation}: {model.origin} has no image encoder (model.image_encoder), so that no "
            "image's embedding is a condition of it. Use a Stage C with one, such as c_1b or c_3b, or start_image=…."
        )


def make_folder(name: str) -> Path:
    """Return the folder `name`, made if it is missing; a ConfigError where it cannot be made."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={name} cannot be a folder: {error.strerror}. Choose another.") from error
    return folder


COMMAND = Command(arguments=GenerateArgs, run=generate, many_ranks=True)
