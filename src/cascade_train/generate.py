"""Make images from a run or an export: `python -m cascade_train.generate from=runs/lora-c_tiny prompts=[…]`.

Thin: loads what the run left, samples, and writes pictures. Sampling itself lives in diffusion/.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cascade_train.config.explain import exit_code
from cascade_train.config.preflight import preflight
from cascade_train.config.saved import export_folder, load_saved_config
from cascade_train.config.verb import parse_verb
from cascade_train.errors import ConfigError


@dataclass(kw_only=True)
class GenerateArgs:
    """Arguments of `python -m cascade_train.generate`; null keeps what the run sampled with."""

    source: str
    """Folder of a run, or its export."""
    prompts: list[str] = field(default_factory=list)
    """What to draw; each prompt gives `count` images."""
    out: str = "generated"
    """Folder that the images go to."""
    count: int = 1
    """Images per prompt."""
    seed: int = 0
    """Seed of the starting noise; an image depends on it, on the prompt and on the image's number."""
    sampler: str | None = None
    """ddpm, ddim or lcm."""
    steps: int | None = None
    """Network evaluations per image."""
    guidance_scale: float | None = None
    """Classifier-free guidance; 1 = none."""
    shift: float | None = None
    """logSNR shift of the sampling schedule; 1 = none."""
    batch_size: int = 8
    """Images denoised at once; does not change them."""
    image: Any = None
    """For control networks: a picture whose map the images follow, one or a list with one for each prompt."""
    control: Any = None
    """For control networks, in the place of image: the map itself as a picture, white for 1."""
    strength: float = 1.0
    """What the control is multiplied by; 0 = none."""
    allow_any_target: bool = False
    """Build whatever classes the folder's configuration names, as for components of your own; trust it first."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError("prompts=[] names nothing to draw, e.g. 'prompts=[\"a small red circle\"]'.")
        for key in ("count", "batch_size"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)} must be 1 or more.")
        if self.image is not None and self.control is not None:
            raise ConfigError("image and control both say what the images follow; give one of them.")
        if self.strength < 0 or (self.strength != 1.0 and not self.files()):
            raise ConfigError(f"strength={self.strength} must be 0 or more, and is for image=… or control=….")
        if len(self.files()) not in (0, 1, len(self.prompts)):
            raise ConfigError(f"{len(self.files())} images for {len(self.prompts)} prompts; give one, or one for each.")

    def files(self) -> list[str]:
        """Return the pictures or maps that the images follow."""
        given = self.image if self.control is None else self.control
        return [] if given is None else [str(each) for each in given] if isinstance(given, list) else [str(given)]


def generate(args: GenerateArgs) -> int:
    """Write `<prompt number>_<image number>.png` and a labelled `grid.png` into `out`; return 0.

    Raises:
        ConfigError: no run or export at `from=`, or arguments that its model refuses.
    """
    folder = Path(args.source)
    cfg = load_saved_config(folder, allow_any_target=args.allow_any_target)
    export = export_folder(folder)
    override_sampling(cfg, args)

    from cascade_train.distributed.process_group import process_group  # heavy: torch and everything above it
    from cascade_train.engine.sampling import compose_grid
    from cascade_train.guide import GuideFiles
    from cascade_train.trained import load_trained

    files = GuideFiles(paths=args.files(), is_map=args.image is None, strength=args.strength, side=cfg.model.image_size)
    jobs = [(prompt, number) for prompt in range(len(args.prompts)) for number in range(args.count)]
    with process_group() as world:
        paint = load_trained(cfg, export, world, seed=args.seed)
        out = make_folder(args.out)
        images = []
        for start in range(0, len(jobs), args.batch_size):
            prompts, numbers = zip(*jobs[start : start + args.batch_size], strict=True)
            guide = files.guide(prompts, numbers) if files.paths else None
            images += paint([args.prompts[prompt] for prompt in prompts], numbers, guide)
    for place, ((_, number), image) in enumerate(zip(jobs, images, strict=True)):
        image.save(out / f"{place // args.count:02d}_{number:02d}.png")
    columns = {f"image {number}": images[number :: args.count] for number in range(args.count)}
    compose_grid(args.prompts, columns).save(out / "grid.png")
    sys.stdout.write(f"{len(images)} images and grid.png lie in {out}\n")
    return 0


def override_sampling(cfg: DictConfig, args: GenerateArgs) -> None:
    """Put the arguments that are given in the place of what the run sampled with.

    Raises:
        ConfigError: a value out of its range.
    """
    for key in ("sampler", "steps", "guidance_scale", "shift"):
        if getattr(args, key) is not None:
            cfg.sample[key] = getattr(args, key)
    preflight(cfg, ranks=1)


def make_folder(name: str) -> Path:
    """Return the folder `name`, made if it is missing.

    Raises:
        ConfigError: it cannot be made.
    """
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={name} cannot be a folder: {error.strerror}. Choose another.") from error
    return folder


def main() -> None:
    """Parse the arguments, generate, and exit: 0 done, 1 stopped by the world, 2 refused."""
    sys.exit(exit_code(lambda: generate(parse_verb(GenerateArgs, sys.argv[1:]))))


if __name__ == "__main__":
    main()
