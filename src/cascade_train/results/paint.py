"""From prompts to images with trained stages: one alone, or C, B and A one after the other.

Lives here: sizes, a user's images, what a stage passes to the next, and that one stage at a time is in memory. Must not
live here: sampling (tasks/text_to_image.py, diffusion/).

Shape legend: B pictures painted at once, C channels, H W latent size.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from cascade_train.assembly.components import Parts, build_component, build_parts
from cascade_train.assembly.model import build_whole_model
from cascade_train.assembly.samples import build_painter
from cascade_train.batch import sample_seed
from cascade_train.distributed.parallelize import evaluating
from cascade_train.distributed.process_group import World
from cascade_train.engine.sampling import to_images
from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import PICTURE_BYTES, open_regular
from cascade_train.results.find import TrainedModel
from cascade_train.tasks.base import Draws, Guide, Painter
from cascade_train.tasks.text_to_image import DiffusionPainter

Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Pictures that are painted at once.

    Attributes:
        captions: one prompt for each.
        numbers: theirs, on which their noise depends, and nothing else.
        guide: a user's images for them; None = none.
    """

    captions: tuple[str, ...]
    numbers: tuple[int, ...]
    guide: Guide | None = None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a finished image and of what the first stage samples.

    Attributes:
        picture: pixels of the finished picture.
        painted: pixels of the first stage's images: its latents' size times their stride.
    """

    picture: Size
    painted: Size


def fit_sizes(
    model: TrainedModel,
    decoder: TrainedModel | None,
    *,
    height: int | None,
    width: int | None,
    compression: float | None,
) -> Sizes:
    """Return the sizes of what is painted. Builds nothing.

    Stage C paints ceil(side / compression) latent positions for a finished picture, as the original does. Without a
    size, they are as many as it was trained with.

    `height` and `width` are of the finished picture in pixels, None = by the training; `compression` is its pixels
    for each latent position of Stage C, None = the model's.

    Raises:
        ConfigError: a run without a stage that paints, sides that do not divide, stages in the wrong places, or
            compressors of different kinds.
    """
    stage = build_component(model.cfg, "model")
    if not build_component(model.cfg, "objective").denoises:
        raise ConfigError(
            f"{model.origin}: trained what makes pictures of {stage.name}'s latents, and paints nothing from prompts: "
            "its samples/ show what comes back of the data's pictures. Name a run of Stage B or C that denoises."
        )
    if "semantic_latents" in stage.abilities:
        compression = stage.semantic_compressor.resolution_multiple if compression is None else compression
        multiple, least = (1, 1) if decoder is None else _steps(stage, model, decoder)
        stride = stage.semantic_compressor.stride
        trained = math.floor(stage.image_size // stride * compression / multiple) * multiple
        what = f"what Stage B of {decoder and decoder.origin} takes as one of its positions"
    elif decoder is None and compression is None:
        multiple, least, trained = stage.image_multiple, 1, stage.image_size
        what = f"one position of what {stage.name} sees of an image"
    else:
        key = "compression" if decoder is None else decoder.origin
        raise ConfigError(f"{key}: comes after Stage C, and {model.origin} is {stage.name}. Leave it out.")
    picture = (trained if height is None else height, trained if width is None else width)
    for key, side in zip(("height", "width"), picture, strict=True):
        _check_side(key, side, multiple, what, least=least)
    if compression is None:
        return Sizes(picture=picture, painted=picture)
    rows, columns = (math.ceil(side / compression) for side in picture)
    return Sizes(picture=picture, painted=(rows * stride, columns * stride))


def _steps(stage: Any, model: TrainedModel, decoder: TrainedModel) -> tuple[int, int]:
    """Return the pixels that Stage B sees as one position, at its first and at its last level."""
    second = build_component(decoder.cfg, "model")
    if "reconstruction" not in second.abilities:
        raise ConfigError(f"{decoder.origin}: is {second.name}; after Stage C comes a Stage B. Name one.")
    first_kind, second_kind = type(stage.semantic_compressor), type(second.semantic_compressor)
    if first_kind is not second_kind:
        raise ConfigError(_other_latents(model, first_kind.__name__, decoder, second_kind.__name__))
    network = second.network_config.arguments
    multiple = second.stage_a.stride * network["patch_size"]
    return multiple, multiple * 2 ** (len(network["block_out_channels"]) - 1)


def _check_side(key: str, side: int, multiple: int, what: str, *, least: int) -> None:
    least = max(least, multiple)
    if side < least or side % multiple:
        below = max(least, side // multiple * multiple)
        raise ConfigError(
            f"{key}={side}: must be a multiple of {multiple} pixels, {what}, and at least {least}; e.g. {below} or "
            f"{below + multiple}."
        )


def _other_latents(model: TrainedModel, first: str, decoder: TrainedModel, second: str) -> str:
    return (
        f"{decoder.origin}: decodes the semantic latents of {second}, and {model.origin} paints those of {first}. A "
        "Stage B understands only latents of the compressor that it was trained with; name one that has the same."
    )


def load_parts(model: TrainedModel, world: World) -> Parts:
    """Build a trained stage and its task around the weights that were exported. Collective.

    Raises:
        ConfigError: the export is not of the configuration's model.
    """
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


def paint(model: TrainedModel, orders: Iterable[Order], *, sizes: Sizes, seed: int, world: World) -> list[Image.Image]:
    """Paint with one stage alone: previews of Stage C, reconstructions of Stage B. Collective.

    Raises:
        ConfigError: weights that are not there or do not fit, or an order that the stage cannot paint.
    """
    parts = load_parts(model, world)
    return _images(build_painter(model.cfg, parts, sizes.painted), parts, orders, seed=seed, stream="generate")


def _images(painter: Painter, parts: Parts, orders: Iterable[Order], *, seed: int, stream: str) -> list[Image.Image]:
    images: list[Image.Image] = []
    with evaluating([parts.stage.network]):
        for order in orders:
            images += to_images(painter.paint(order.captions, None, draws(seed, order, stream), order.guide))
    return images


def paint_cascade(
    model: TrainedModel,
    decoder: TrainedModel,
    orders: Iterable[Order],
    *,
    sizes: Sizes,
    seed: int,
    world: World,
) -> list[Image.Image]:
    """Paint with Stage C, B and A; Stage C has left the memory when Stage B enters it. Collective.

    Raises:
        ConfigError: weights that are not there or do not fit, or stages that were not made for each other.
    """
    painted, first = _semantic_latents(model, orders, size=sizes.painted, seed=seed, world=world)
    gc.collect()  # modules refer to each other
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    parts = load_parts(decoder, world)
    check_same_latents(model, first, decoder, Fingerprint.of(parts.stage))
    return _images(build_painter(decoder.cfg, parts, sizes.picture), parts, painted, seed=seed, stream="decode")


def _semantic_latents(
    model: TrainedModel, orders: Iterable[Order], *, size: Size, seed: int, world: World
) -> tuple[list[Order], Fingerprint]:
    """Return orders for Stage B, which hold what Stage C painted, on the host; and what its latents are those of."""
    parts = load_parts(model, world)
    painter = build_painter(model.cfg, parts, size)
    if not isinstance(painter, DiffusionPainter):
        raise AssertionError("a Stage C is sampled by diffusion")
    painted = []
    with evaluating([parts.stage.network]):
        for order in orders:
            latent_BCHW = painter.latents(order.captions, None, draws(seed, order, "generate"), order.guide)
            painted.append(replace(order, guide=Guide(semantic_BCHW=latent_BCHW.cpu())))
    return painted, Fingerprint.of(parts.stage)


def draws(seed: int, order: Order, stream: str) -> Draws:
    """Return the seeded draws of noise for an order's pictures: `stream` names the stage that samples."""

    def generators(_: str) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(sample_seed(seed, 0, number, stream)) for number in order.numbers]

    return generators


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Identity of a compressor: its class and values, whatever file they were loaded from."""

    kind: str
    weights: str | None
    digest: str

    @classmethod
    def of(cls, stage: Any) -> Fingerprint:
        """Return the fingerprint of a built stage's compressor."""
        compressor = stage.semantic_compressor
        hashed = hashlib.sha256(type(compressor).__name__.encode())
        for name, value in chain(compressor.module.named_parameters(), compressor.module.named_buffers()):
            hashed.update(name.encode())
            hashed.update(value.detach().cpu().float().contiguous().numpy().tobytes())
        return cls(kind=type(compressor).__name__, weights=compressor.weights, digest=hashed.hexdigest())

    def __str__(self) -> str:
        """Name class and weights, and the beginning of the digest, which differs where those do not."""
        return f"{self.kind} (weights={self.weights}, {self.digest[:8]})"


def check_same_latents(model: TrainedModel, first: Fingerprint, decoder: TrainedModel, second: Fingerprint) -> None:
    """Refuse a Stage B that decodes other latents than a Stage C paints: their compressors differ."""
    if first.digest != second.digest:
        raise ConfigError(_other_latents(model, str(first), decoder, str(second)))


MAP_MODES = {"1": "L", "L": "L", "LA": "L", "RGBA": "RGBA"}
"""Mode of a stored map -> that of its channels; all others are read as three colours."""


@dataclass(frozen=True, kw_only=True)
class GuideFiles:
    """Files that samples follow or start from; of each kind none, one for all prompts, or one for each.

    Attributes:
        key: how `paths` were named: "image", or "control" for finished control maps.
        paths: what the samples follow.
        strength: what the control is multiplied by.
        starts: what they start from.
        start_strength: time to which those are noised.
        variations: whose embeddings are conditions.
        size: height and width in pixels, to which all but `variations` are cropped and resized.
        side: of the squares to which `variations` are.
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
        """Return the guide of some images; None where there are no files.

        Args:
            prompts: index of each image's prompt.
            numbers: of the images, on which random choices about their maps depend.

        Raises:
            ConfigError: a file that is no picture, or maps of different kinds.
        """
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
    """Return a picture, or for the key "control" a map, as (C, *size) uint8, the middle of it in another shape.

    Raises:
        ConfigError: the file is no picture.
    """
    try:
        with open_regular(Path(path).expanduser(), limit=PICTURE_BYTES) as file, Image.open(file) as stored:
            upright = ImageOps.exif_transpose(stored)
            picture = upright.convert(MAP_MODES.get(upright.mode, "RGB") if key == "control" else "RGB")
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{key}={path}: no picture that can be read ({type(error).__name__}); name one") from error
    fitted = ImageOps.fit(picture, size[::-1], Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.atleast_3d(np.asarray(fitted)).transpose(2, 0, 1))
