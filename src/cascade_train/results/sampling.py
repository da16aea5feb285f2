"""From prompts to images with trained stages: one alone, or C, B and A one after the other.

Lives here: sizes, a user's images, what a stage passes to the next, and that one stage at a time is in memory. Must not
live here: sampling (tasks/text_to_image.py, diffusion/).

Shape legend: B images sampled at once, C channels, H W latent size.
"""

from __future__ import annotations

import gc
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from cascade_train.assembly.components import Parts, build_component, build_parts
from cascade_train.assembly.model import build_whole_model
from cascade_train.assembly.samples import build_image_sampler
from cascade_train.batch import sample_seed
from cascade_train.data.decoding.decode import to_rgb
from cascade_train.distributed.consensus import from_every_rank
from cascade_train.distributed.parallelize import evaluating
from cascade_train.distributed.process_group import World
from cascade_train.engine.sampling import compose_grid
from cascade_train.errors import ConfigError, RunError, unwritten
from cascade_train.files.output import locked
from cascade_train.files.untrusted import PICTURE_BYTES, open_regular
from cascade_train.results.find import TrainedModel
from cascade_train.tasks.base import Draws, Guide
from cascade_train.tasks.text_to_image import DiffusionImageSampler

_NUMBERED = re.compile(r"(\d+)_\d+\.png|grid_(\d+)\.png")

Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """Prompts that are sampled at once, the numbers that seed their noise, a guide, and images to reconstruct.

    `image_BCHW` is (B, 3, H, W) uint8 on the host.
    """

    captions: tuple[str, ...]
    numbers: tuple[int, ...]
    guide: Guide | None = None
    image_BCHW: Tensor | None = None


Save = Callable[[PromptBatch, Tensor], object]
"""Keeps the images of a batch, (B, 3, H, W) float in [0, 1]."""


def batches_of(prompts: Sequence[str], files: GuideFiles, *, count: int, batch_size: int) -> list[PromptBatch]:
    """Batches of `count` images of each prompt, with their pictures."""
    jobs = [(prompt, number) for prompt in range(len(prompts)) for number in range(count)]
    batches = []
    for start in range(0, len(jobs), batch_size):
        chosen, numbers = zip(*jobs[start : start + batch_size], strict=True)
        captions = tuple(prompts[prompt] for prompt in chosen)
        batches.append(PromptBatch(captions=captions, numbers=numbers, guide=files.guide(chosen, numbers)))
    return batches


def write_images(images: list[Image.Image], prompts: Sequence[str], folder: Path) -> tuple[Path, Path]:
    """Write `<prompt>_<image>.png` and a grid, numbered on from what is in the folder; return first image and grid."""
    count = len(images) // len(prompts)
    columns = {f"image {number}": images[number::count] for number in range(count)}
    try:
        with locked(folder):
            taken = (
                int(match[1] or match[2]) for path in folder.iterdir() if (match := _NUMBERED.fullmatch(path.name))
            )
            start = 1 + max(taken, default=-1)
            paths = [folder / f"{start + i // count:02d}_{i % count:02d}.png" for i in range(len(images))]
            grid = folder / (f"grid_{start:02d}.png" if start or (folder / "grid.png").exists() else "grid.png")
            for path, picture in (*zip(paths, images, strict=True), (grid, compose_grid(prompts, columns))):
                with path.open("xb") as file:
                    picture.save(file, format="png")
    except OSError as error:
        raise RunError(f"{unwritten(folder, error)}. Choose another out.") from error
    return paths[0], grid


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Pixels of a finished picture, and of the first stage's: its latents times their stride."""

    picture: Size
    sampled: Size


def fit_sizes(
    model: TrainedModel,
    decoder: TrainedModel | None,
    *,
    height: int | None,
    width: int | None,
    compression: float | None,
) -> Sizes:
    """Sizes of what is sampled. Builds nothing.

    Stage C samples ceil(side / compression) latent positions for a finished picture, as the original does. Without a
    size, they are as many as it was trained with.

    `compression` is pixels of the finished picture for each latent position of Stage C; None = the model's.
    """
    stage = build_component(model.cfg, "model")
    if not build_component(model.cfg, "objective").denoises:
        raise ConfigError(
            f"{model.origin}: trained what makes pictures of {stage.name}'s latents, and samples nothing from prompts; "
            "its samples/ show reconstructions. Name a run of Stage B or C that denoises."
        )
    if "semantic_latents" in stage.abilities:
        compression = stage.semantic_compressor.resolution_multiple if compression is None else compression
        multiple, least = (1, 1) if decoder is None else _decoded_multiples(stage, model, decoder)
        stride = stage.semantic_compressor.stride
        trained = math.floor(stage.image_size // stride * compression / multiple) * multiple
        what = f"one position of Stage B of {decoder and decoder.origin}"
    elif decoder is None and compression is None:
        multiple, least, trained = stage.image_multiple, 1, stage.image_size
        what = f"one position of {stage.name}"
    else:
        key = "compression" if decoder is None else decoder.origin
        raise ConfigError(f"{key}: comes after Stage C, and {model.origin} is {stage.name}. Leave it out.")
    picture = (trained if height is None else height, trained if width is None else width)
    for key, side in zip(("height", "width"), picture, strict=True):
        _check_side(key, side, multiple, what, least=max(least, multiple))
    if compression is None:
        return Sizes(picture=picture, sampled=picture)
    rows, columns = (math.ceil(side / compression) for side in picture)
    return Sizes(picture=picture, sampled=(rows * stride, columns * stride))


def _decoded_multiples(stage: Any, model: TrainedModel, decoder: TrainedModel) -> tuple[int, int]:
    """Pixels of one position of Stage B, at its first and at its last level."""
    second = build_component(decoder.cfg, "model")
    if "reconstruction" not in second.abilities:
        raise ConfigError(f"{decoder.origin}: is {second.name}; after Stage C comes a Stage B. Name one.")
    kinds = [type(each.semantic_compressor) for each in (stage, second)]
    if kinds[0] is not kinds[1]:
        raise _other_latents(model, kinds[0].__name__, decoder, kinds[1].__name__)
    return second.decoded_multiples()


def _check_side(key: str, side: int, multiple: int, what: str, *, least: int) -> None:
    if side < least or side % multiple:
        below = max(least, side // multiple * multiple)
        raise ConfigError(
            f"{key}={side}: must be a multiple of {multiple} pixels, {what}, and at least {least}; e.g. {below} or "
            f"{below + multiple}."
        )


def _other_latents(model: TrainedModel, first: str, decoder: TrainedModel, second: str) -> ConfigError:
    return ConfigError(
        f"{decoder.origin}: decodes the semantic latents of {second}, and {model.origin} samples those of {first}. "
        "Name a Stage B that was trained with the same compressor."
    )


def load_parts(model: TrainedModel, world: World) -> Parts:
    """Build a trained stage and its task around the weights that were exported. Collective."""
    cfg = model.cfg.copy()
    if model.export is not None:
        if build_component(cfg, "task").trains_network:
            cfg.model.weights = str(model.export)
        for key in {"weights", "backbone_weights"} & set(cfg.task):
            cfg.task[key] = None  # what they became lies in the export
    parts = build_parts(cfg)
    build_whole_model(cfg, parts, world)
    if model.export is not None:
        parts.task.load_export(model.export)
    return parts


@contextmanager
def loaded(model: TrainedModel, world: World) -> Iterator[Parts]:
    """Build a trained stage to sample with; the one before it is freed first. Collective."""
    gc.collect()  # modules refer to each other
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    parts = load_parts(model, world)
    with evaluating([] if "network" in parts.stage.left_out else [parts.stage.network]):
        yield parts


def sample_images(
    model: TrainedModel,
    decoder: TrainedModel | None,
    batches: Iterable[PromptBatch],
    save: Save,
    *,
    sizes: Sizes | None,
    seed: int,
    world: World,
) -> None:
    """Sample a rank's batches with Stage C, B and A, or with one stage alone, and `save` the images. Collective.

    Without a decoder, previews of Stage C, or reconstructions of Stage B. Stage C is freed before Stage B is loaded.
    `sizes`: None = those of the batches' own images.
    """
    latents: list[tuple[PromptBatch, Tensor]] = []
    with loaded(model, world) as parts:

        def sample() -> None:
            for batch in batches:
                image_BCHW, size = None, None if sizes is None else sizes.sampled
                if batch.image_BCHW is not None:
                    height, width = batch.image_BCHW.shape[-2:]
                    image_BCHW, size = batch.image_BCHW.to(world.device).float() / 255, (height, width)
                given = batch.captions, image_BCHW, draws(seed, batch, "generate"), batch.guide
                sampler = build_image_sampler(model.cfg, parts, size)
                if decoder is None:
                    save(batch, sampler.sample(*given))
                else:
                    assert isinstance(sampler, DiffusionImageSampler), "a Stage C is sampled by diffusion"
                    latents.append((batch, sampler.latents(*given).cpu()))

        from_every_rank(sample)
        compressor = None if decoder is None else Fingerprint.of(parts.stage)
        del parts
    if decoder is None or compressor is None or sizes is None:
        return
    with loaded(decoder, world) as parts:
        check_same_latents(model, compressor, decoder, Fingerprint.of(parts.stage))
        second = build_image_sampler(decoder.cfg, parts, sizes.picture)

        def decode() -> None:
            for batch, latent_BCHW in latents:
                guide = Guide(semantic_BCHW=latent_BCHW)
                save(batch, second.sample(batch.captions, None, draws(seed, batch, "decode"), guide))

        from_every_rank(decode)


def draws(seed: int, batch: PromptBatch, stream: str) -> Draws:
    """Seeded draws of noise for a batch's images: `stream` names the stage that samples."""

    def generators(_: str) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(sample_seed(seed, 0, number, stream)) for number in batch.numbers]

    return generators


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Identity of a compressor: class and digest of its values, whatever their file."""

    kind: str
    weights: str | None
    digest: str

    @classmethod
    def of(cls, stage: Any) -> Fingerprint:
        """Fingerprint of a built stage's compressor."""
        compressor = stage.semantic_compressor
        hashed = hashlib.sha256(type(compressor).__name__.encode())
        for name, value in chain(compressor.module.named_parameters(), compressor.module.named_buffers()):
            hashed.update(name.encode())
            hashed.update(value.detach().cpu().float().contiguous().numpy().tobytes())
        return cls(kind=type(compressor).__name__, weights=compressor.weights, digest=hashed.hexdigest())

    def __str__(self) -> str:
        """Class, weights, and the beginning of the digest."""
        return f"{self.kind} (weights={self.weights}, {self.digest[:8]})"


def check_same_latents(model: TrainedModel, first: Fingerprint, decoder: TrainedModel, second: Fingerprint) -> None:
    """Refuse a Stage B that decodes other latents than a Stage C samples: their compressors differ."""
    if first.digest != second.digest:
        raise _other_latents(model, str(first), decoder, str(second))


MAP_MODES = {"1": "L", "L": "L", "LA": "L", "RGBA": "RGBA"}
"""Mode of a stored map -> that of its channels; all others are read as three colours."""


@dataclass(frozen=True, kw_only=True)
class GuideFiles:
    """Files that samples follow or start from; of each kind none, one for all prompts, or one for each.

    Attributes:
        key: of `paths`, which samples follow: "image", or "control" for finished control maps.
        strength: factor of the control.
        start_strength: time to which `starts` are noised.
        variations: files whose embeddings are conditions, cropped to squares of `side` pixels.
        size: height and width in pixels, to which all others are cropped and resized.
    """

    key: str
    paths: Sequence[str]
    strength: float
    starts: Sequence[str] = ()
    start_strength: float = 1.0
    variations: Sequence[str] = ()
    size: Size
    side: int

    def guide(self, prompts: Sequence[int], numbers: Sequence[int]) -> Guide | None:
        """Guide of images, by index of each one's prompt, and number."""
        if not (self.paths or self.starts or self.variations):
            return None
        return Guide(
            image_BCHW=self._read_all(self.key, self.paths, prompts, self.size),
            is_map=self.key == "control",
            strength=self.strength,
            numbers=tuple(numbers),
            start_BCHW=self._read_all("start_image", self.starts, prompts, self.size),
            start_strength=self.start_strength,
            variation_BCHW=self._read_all("variation", self.variations, prompts, (self.side, self.side)),
        )

    def _read_all(self, key: str, paths: Sequence[str], prompts: Sequence[int], size: Size) -> Tensor | None:
        if not paths:
            return None
        arrays = [read_picture(key, paths[prompt % len(paths)], size) for prompt in prompts]
        if len({array.shape for array in arrays}) > 1:
            raise ConfigError(f"{key}={','.join(paths)}: maps of one kind are needed: all grey, or all coloured")
        return torch.from_numpy(np.stack(arrays))


def read_picture(key: str, path: str, size: Size) -> np.ndarray:
    """A picture, for "control" a map, as (C, *size) uint8, center-cropped."""
    try:
        with open_regular(Path(path).expanduser(), limit=PICTURE_BYTES) as file, Image.open(file) as stored:
            upright = ImageOps.exif_transpose(stored)
            mode = MAP_MODES.get(upright.mode) if key == "control" else None
            picture = to_rgb(upright) if mode is None else upright.convert(mode)
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{key}={path}: no picture that can be read ({type(error).__name__}); name one") from error
    fitted = ImageOps.fit(picture, size[::-1], Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.atleast_3d(np.asarray(fitted)).transpose(2, 0, 1))
