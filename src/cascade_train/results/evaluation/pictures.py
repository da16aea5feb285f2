"""Pictures of an evaluation: numbered files, each a function of seed and number alone, made by all ranks.

A picture appears whole or not at all, and those that are there are not made again. What they are compared with is not
known here.

Shape legend: B pictures made at once, C channels, H W size.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade_train.assembly.components import Parts
from cascade_train.assembly.samples import build_painter
from cascade_train.distributed.consensus import from_every_rank, from_rank_zero
from cascade_train.distributed.parallelize import evaluating
from cascade_train.distributed.process_group import World
from cascade_train.engine.sampling import to_images
from cascade_train.errors import ConfigError
from cascade_train.files.durable import replacing
from cascade_train.files.untrusted import PICTURE_BYTES, load_mapping, open_regular
from cascade_train.results.evaluation.originals import Originals
from cascade_train.results.find import TrainedModel
from cascade_train.results.paint import Fingerprint, Order, Sizes, check_same_latents, draws, load_parts
from cascade_train.tasks.base import Guide
from cascade_train.tasks.text_to_image import DiffusionPainter

Batch = tuple[int, ...]
"""Numbers of pictures that are made at once, always these together, so that rounding is the same each time."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is made.

    Attributes:
        captions: of each picture, by its number.
        batches: the numbers, in batches.
        seed: of the noise, with a picture's number.
        originals: what pictures reconstruct or follow, by number; None = captions alone.
    """

    captions: Sequence[str]
    batches: Sequence[Batch]
    seed: int
    originals: Originals | None

    def order(self, batch: Batch, guide: Guide | None = None) -> Order:
        """Return what is painted at once."""
        return Order(captions=tuple(self.captions[number] for number in batch), numbers=batch, guide=guide)


@dataclass(frozen=True)
class Folder:
    """Where the pictures of an evaluation lie, on a file system that all ranks share."""

    path: Path

    def make(self) -> None:
        """Make the folder, where it is missing."""
        for name in ("pictures", "latents"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove the pictures, and the latents that wait to be decoded."""
        for name in ("pictures", "latents"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def picture(self, number: int) -> Path:
        """Return the place of a picture."""
        return self.path / "pictures" / f"{number:06d}.png"

    def latent(self, batch: Batch) -> Path:
        """Return the place of what Stage C sampled for pictures that Stage B has not decoded yet."""
        return self.path / "latents" / f"{batch[0]:06d}-{batch[-1]:06d}.safetensors"

    @property
    def compressor(self) -> Path:
        """The place of the name of the compressor that those latents belong to."""
        return self.path / "latents" / "compressor.json"

    def read(self, number: int) -> Tensor:
        """Return a picture, (3, H, W) uint8."""
        path = self.picture(number)
        try:
            with open_regular(path, limit=PICTURE_BYTES) as file, Image.open(file) as image:
                return torch.from_numpy(np.array(image.convert("RGB")).transpose(2, 0, 1).copy())
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow raises all of them
            raise ConfigError(f"{path} is no whole picture ({error}); remove it, and it is made again") from error

    def save(self, batch: Batch, image_BCHW: Tensor) -> None:
        """Write the pictures of a batch that are not there, (B, 3, H, W) float in [0, 1]."""
        for number, image in zip(batch, to_images(image_BCHW), strict=True):
            if not self.picture(number).is_file():
                with replacing(self.picture(number), durable=False) as beside:
                    image.save(beside)


def missing(work: Work, folder: Folder) -> list[Batch]:
    """Return the batches that have pictures to make. Collective."""
    return from_rank_zero(
        lambda: [batch for batch in work.batches if not all(folder.picture(number).is_file() for number in batch)]
    )


def make_pictures(
    model: TrainedModel,
    decoder: TrainedModel | None,
    work: Work,
    folder: Folder,
    *,
    todo: Sequence[Batch],
    sizes: Sizes | None,
    world: World,
) -> None:
    """Make the batches `todo`, each on one rank; `sizes` are those of prompts, None = those of `work.originals`.

    Collective.

    Raises:
        ConfigError: weights that are not there or do not fit, or stages that were not made for each other.
    """
    from_rank_zero(folder.make)
    if decoder is None:
        _in_one_stage(model, work, folder, todo, sizes, world)
    else:
        assert sizes is not None, "what follows pictures has no decoder"
        _sample_latents(model, work, folder, todo, sizes, world)
        _decode(model, decoder, work, folder, todo, sizes, world)
    from_rank_zero(lambda: shutil.rmtree(folder.path / "latents"))


def _in_one_stage(
    model: TrainedModel, work: Work, folder: Folder, todo: Sequence[Batch], sizes: Sizes | None, world: World
) -> None:
    with _loaded(model, world) as parts:

        def paint(batch: Batch) -> None:
            order, size = work.order(batch), None if sizes is None else sizes.painted
            image_BCHW = None if work.originals is None else _on(parts, work.originals.read(batch).image_BCHW)
            painter = build_painter(model.cfg, parts, size if image_BCHW is None else image_BCHW.shape[-2:])
            folder.save(batch, painter.paint(order.captions, image_BCHW, draws(work.seed, order, "generate")))

        _deal(todo, paint, world)


def _sample_latents(
    model: TrainedModel, work: Work, folder: Folder, todo: Sequence[Batch], sizes: Sizes, world: World
) -> None:
    """Let Stage C sample the latents that are not there."""
    left = from_rank_zero(lambda: [batch for batch in todo if not folder.latent(batch).is_file()])
    if not left:
        return
    with _loaded(model, world) as parts:
        painter = build_painter(model.cfg, parts, sizes.painted)
        assert isinstance(painter, DiffusionPainter), "a Stage C is sampled by diffusion"
        fingerprint = Fingerprint.of(parts.stage)
        from_rank_zero(lambda: folder.compressor.write_text(json.dumps(asdict(fingerprint))))

        def paint(batch: Batch) -> None:
            order = work.order(batch)
            latent_BCHW = painter.latents(order.captions, None, draws(work.seed, order, "generate"))
            with replacing(folder.latent(batch), durable=False) as beside:
                save_file({"latent": latent_BCHW.cpu().contiguous()}, beside)

        _deal(left, paint, world)


def _decode(
    model: TrainedModel,
    decoder: TrainedModel,
    work: Work,
    folder: Folder,
    todo: Sequence[Batch],
    sizes: Sizes,
    world: World,
) -> None:
    """Let Stage B and A make pictures of the latents."""
    with _loaded(decoder, world) as parts:
        sampled = Fingerprint(**load_mapping(folder.compressor, kind=str, digest=str))
        check_same_latents(model, sampled, decoder, Fingerprint.of(parts.stage))
        painter = build_painter(decoder.cfg, parts, sizes.picture)

        def paint(batch: Batch) -> None:
            order = work.order(batch, Guide(semantic_BCHW=load_file(folder.latent(batch))["latent"]))
            folder.save(batch, painter.paint(order.captions, None, draws(work.seed, order, "decode"), order.guide))

        _deal(todo, paint, world)


@contextmanager
def _loaded(model: TrainedModel, world: World) -> Iterator[Parts]:
    """Build a stage for the block, for sampling alone; the one before it leaves the memory first. Collective."""
    gc.collect()  # modules refer to each other
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    parts = load_parts(model, world)
    with evaluating([] if "network" in parts.stage.left_out else [parts.stage.network]), torch.no_grad():
        yield parts


def _deal(batches: Sequence[Batch], work: Callable[[Batch], None], world: World) -> None:
    """Do this rank's share of the batches; a failure reaches all ranks. Collective."""

    def do_own() -> None:
        for batch in batches[world.rank :: world.ranks]:
            work(batch)

    from_every_rank(do_own)


def _on(parts: Parts, image_BCHW: Tensor | None) -> Tensor:
    assert image_BCHW is not None, "originals are pictures"
    return image_BCHW.to(parts.task.device).float() / 255
