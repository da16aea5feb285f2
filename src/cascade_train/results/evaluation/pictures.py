"""Pictures of an evaluation: originals, held out or a user's, and those that are made.

What is made are numbered files, each a function of seed and number alone, made by all ranks. A file appears whole or
not at all, and those that are there are not made again.

Shape legend: B pictures of a batch, N of a set, C channels, H W size in pixels.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade_train.assembly.components import Parts, build_component
from cascade_train.assembly.samples import build_image_sampler
from cascade_train.batch import Batch
from cascade_train.config.saved import composed
from cascade_train.data.data_set import Rows, open_data_set
from cascade_train.data.loading.worker import MicroBatches
from cascade_train.data.order.plan import Step
from cascade_train.data.source import Source
from cascade_train.distributed.consensus import from_every_rank, from_rank_zero
from cascade_train.distributed.process_group import World
from cascade_train.engine.sampling import to_images
from cascade_train.errors import ConfigError, RunError
from cascade_train.files.durable import replacing
from cascade_train.files.untrusted import PICTURE_BYTES, load_mapping, open_regular
from cascade_train.results.find import TrainedModel
from cascade_train.results.sampling import (
    Fingerprint,
    PromptBatch,
    Sizes,
    draws,
    latent_decoder,
    latent_sampler,
    loaded,
)
from cascade_train.tasks.base import Guide

Numbers = tuple[int, ...]
"""Numbers of pictures that are always made together, so that rounding is the same."""

Make = Callable[[Numbers], None]
"""Makes the files of a batch."""

KINDS = {".csv": "csv", ".tsv": "csv", ".jsonl": "csv", ".ndjson": "csv", ".parquet": "parquet"}
"""Option of `data` that reads a file, by its extension; a folder is data=folder, all else tars."""

AS_THEY_ARE = {"crop": "center", "flip_prob": 0.0}
"""Options of any data by which a picture is the same each time."""


class Originals:
    """Numbered pictures of an opened source, center-cropped to the sizes of its buckets."""

    def __init__(self, name: str, rows: Rows) -> None:
        self.name, self._rows = name, rows
        table = rows.source.bucket_table(rows.index)
        width_N, height_N = (rows.index.table[side][rows.rows] for side in ("width", "height"))
        self._sizes_N2: np.ndarray = table.sizes_K2[table.nearest(width_N, height_N)]
        none = {(int(height), int(width)): np.zeros(0, dtype=np.int64) for height, width in table.sizes_K2}
        self._reader = MicroBatches(rows.source, rows.index, stand_ins=none, seed=0)

    @property
    def digest(self) -> str:
        """16 hex digits that change when a picture is added, removed, renamed or of another size."""
        state = hashlib.sha256(self._rows.index.digest.encode())
        for array in (self._rows.rows, self._sizes_N2):
            state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._rows.rows)

    def first(self, count: int | None, *, seed: int) -> Originals:
        """Return `count` of the pictures, drawn by the seed; None = all."""
        return self if count is None else Originals(self.name, self._rows.first(count, seed=seed))

    def batches(self, size: int) -> list[tuple[int, ...]]:
        """Return the numbers of all pictures in batches of one shape, of at most `size`."""
        shapes: dict[tuple[int, int], list[int]] = {}
        for number, (height, width) in enumerate(self._sizes_N2.tolist()):
            shapes.setdefault((height, width), []).append(number)
        return [tuple(same[start : start + size]) for same in shapes.values() for start in range(0, len(same), size)]

    def read(self, numbers: Sequence[int]) -> Batch:
        """Read pictures of one shape, (B, 3, H, W) uint8; a RunError names a damaged one."""
        rows = self._rows.rows[list(numbers)]
        height, width = self._sizes_N2[numbers[0]].tolist()
        made = self._reader[Step(rows=rows, epochs=np.zeros_like(rows), height=height, width=width)]
        if isinstance(made, RunError):
            raise RunError(f"{self.name}: {made}. Mend or remove it.")
        return made

    def images(self, numbers: Sequence[int]) -> list[Tensor]:
        """Read pictures of one shape, (3, H, W) uint8 each."""
        image_BCHW = self.read(numbers).image_BCHW
        assert image_BCHW is not None, "originals are pictures"
        return list(image_BCHW)

    def captions(self, numbers: Sequence[int]) -> list[str]:
        """Return captions without decoding the pictures."""
        source = self._rows.source
        rows = self._rows.rows[list(numbers)].tolist()
        return [source.captions_of(row)(source.read(row), torch.Generator().manual_seed(0)) for row in rows]


def open_originals(cfg: DictConfig, real: Sequence[str]) -> Originals:
    """Open the pictures that a user names, or else those that a run held out."""
    if not real:
        return Originals("the run's held-out pictures", _held_out(cfg))
    try:
        source = _source(list(real), image_size=cfg.model.image_size)
        source.check()
        rows = open_data_set(source, share=None, held_out=None).training
    except ConfigError as error:
        raise ConfigError(f"real={','.join(real)}: {error}") from error
    return Originals(", ".join(real), rows)


def _held_out(cfg: DictConfig) -> Rows:
    options = {**AS_THEY_ARE, "image_size": cfg.model.image_size}
    source: Source = build_component(cfg, "data", **options)
    given = cfg.validate.urls
    held_out = None if given is None else build_component(cfg, "data", **options, urls=list(given))
    rows = open_data_set(source, share=cfg.validate.share, held_out=held_out).held_out
    if rows is None or source.is_cache or not rows.index.rows_are_samples:
        reason = "held out no pictures (validate.share)" if rows is None else "has no pictures that can be numbered"
        raise ConfigError(f"real=null: {reason}. Name a folder, a table or tars of pictures: real=photos.")
    return rows


def _source(real: list[str], *, image_size: int) -> Source:
    suffix = Path(real[0]).suffix.lower()
    is_folder = Path(real[0]).expanduser().is_dir() or not (suffix or "://" in real[0])
    kind = "folder" if is_folder else KINDS.get(suffix, "webdataset")
    place = "urls" if kind == "webdataset" else "path"
    cfg = composed(["model=c_tiny", "task=finetune", "run.name=real", f"data={kind}", f"data.{place}=here"])
    named = real if len(real) > 1 or kind == "webdataset" else real[0]
    source: Source = build_component(cfg, "data", **AS_THEY_ARE, image_size=image_size, **{place: named})
    return source


@dataclass(frozen=True, kw_only=True)
class Work:
    """The pictures to make: their captions by number, the numbers in batches, and the seed of their noise.

    `originals`, by number, are what pictures reconstruct or follow; None = captions alone.
    """

    captions: Sequence[str]
    batches: Sequence[Numbers]
    seed: int
    originals: Originals | None

    def prompts(self, batch: Numbers) -> PromptBatch:
        """Return the prompts of a batch."""
        return PromptBatch(captions=tuple(self.captions[number] for number in batch), numbers=batch)


@dataclass(frozen=True)
class Folder:
    """Where the pictures of an evaluation lie, on a file system that all ranks share."""

    path: Path

    def make(self) -> None:
        """Make the folder where it is missing."""
        for name in ("pictures", "latents"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove the pictures, and the latents that wait to be decoded."""
        for name in ("pictures", "latents"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def picture(self, number: int) -> Path:
        """Return the place of a picture."""
        return self.path / "pictures" / f"{number:06d}.png"

    def latent(self, batch: Numbers) -> Path:
        """Return the place of what Stage C sampled for pictures that Stage B has not decoded yet."""
        return self.path / "latents" / f"{batch[0]:06d}-{batch[-1]:06d}.safetensors"

    @property
    def compressor(self) -> Path:
        """The place of the name of the compressor that those latents belong to."""
        return self.path / "latents" / "compressor.json"

    def has_pictures(self, batch: Numbers) -> bool:
        """Return whether all pictures of a batch are there."""
        return all(self.picture(number).is_file() for number in batch)

    def read(self, number: int) -> Tensor:
        """Return a picture, (3, H, W) uint8."""
        path = self.picture(number)
        try:
            with open_regular(path, limit=PICTURE_BYTES) as file, Image.open(file) as image:
                return torch.from_numpy(np.array(image.convert("RGB")).transpose(2, 0, 1).copy())
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow raises all of them
            raise ConfigError(f"{path} is no whole picture ({error}); remove it, and it is made again") from error

    def read_all(self, batch: Numbers) -> list[Tensor]:
        """Return the pictures of a batch, (3, H, W) uint8 each."""
        return [self.read(number) for number in batch]

    def save(self, batch: Numbers, image_BCHW: Tensor) -> None:
        """Write the pictures of a batch that are not there, (B, 3, H, W) float in [0, 1]."""
        for number, image in zip(batch, to_images(image_BCHW), strict=True):
            if not self.picture(number).is_file():
                with replacing(self.picture(number), durable=False) as beside:
                    image.save(beside)


@dataclass(frozen=True, kw_only=True)
class PictureMaker:
    """Makes an evaluation's pictures; `sizes=None`: those of `work.originals`."""

    model: TrainedModel
    decoder: TrainedModel | None
    work: Work
    folder: Folder
    sizes: Sizes | None
    world: World

    def make(self, prepare: Callable[[], None]) -> None:
        """Make the pictures that are missing, each batch on one rank, after `prepare`. Collective."""
        folder = self.folder
        todo = from_rank_zero(lambda: [each for each in self.work.batches if not folder.has_pictures(each)])
        if not todo:
            return
        prepare()
        from_rank_zero(folder.make)
        if self.decoder is None:
            self._share(self.model, todo, self._image_maker)
        else:
            left = from_rank_zero(lambda: [batch for batch in todo if not folder.latent(batch).is_file()])
            if left:
                self._share(self.model, left, self._sampler)
            self._share(self.decoder, todo, self._decoder)
        from_rank_zero(lambda: shutil.rmtree(folder.path / "latents"))

    def _share(self, model: TrainedModel, batches: Sequence[Numbers], build: Callable[[Parts], Make]) -> None:
        """Load a stage and do this rank's share of the batches; a failure reaches all ranks. Collective."""
        with loaded(model, self.world) as parts:
            make = build(parts)
            own = batches[self.world.rank :: self.world.ranks]
            from_every_rank(lambda: [make(batch) for batch in own])

    def _image_maker(self, parts: Parts) -> Make:
        def sample(batch: Numbers) -> None:
            prompts, image_BCHW, guide = self.work.prompts(batch), None, None
            size: Sequence[int] | None = None if self.sizes is None else self.sizes.sampled
            if self.work.originals is not None:
                pixels_BCHW = torch.stack(self.work.originals.images(batch))
                image_BCHW = pixels_BCHW.to(parts.task.device, non_blocking=True).float() / 255
                size = image_BCHW.shape[-2:]
                guide = Guide(image_BCHW=pixels_BCHW, numbers=batch)
            image_sampler, noise = (
                build_image_sampler(self.model.cfg, parts, size),
                draws(self.work.seed, prompts, "generate"),
            )
            self.folder.save(batch, image_sampler.sample(prompts.captions, image_BCHW, noise, guide))

        return sample

    def _sampler(self, parts: Parts) -> Make:
        sample = latent_sampler(self.model, parts, self._sizes(), self.work.seed)
        fingerprint = json.dumps(asdict(Fingerprint.of(parts.stage)))
        from_rank_zero(lambda: self.folder.compressor.write_text(fingerprint))

        def save(batch: Numbers) -> None:
            latent_BCHW = sample(self.work.prompts(batch))
            with replacing(self.folder.latent(batch), durable=False) as beside:
                save_file({"latent": latent_BCHW.cpu().contiguous()}, beside)

        return save

    def _decoder(self, parts: Parts) -> Make:
        assert self.decoder is not None, "asked before"
        sampled = Fingerprint(**load_mapping(self.folder.compressor, kind=str, digest=str))
        decode = latent_decoder(self.model, sampled, self.decoder, parts, self._sizes(), self.work.seed)

        def save(batch: Numbers) -> None:
            latent_BCHW = load_file(self.folder.latent(batch))["latent"]
            self.folder.save(batch, decode(self.work.prompts(batch), latent_BCHW))

        return save

    def _sizes(self) -> Sizes:
        assert self.sizes is not None, "what follows pictures has no decoder"
        return self.sizes
