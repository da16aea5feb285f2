"""Fills a cache: images and captions go through the encoders of a run, unit by unit.

Processes share only the folder: each makes its own units, and a complete unit stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from cascade_train.assembly.cache_identity import (
    data_identity,
    encoder_identity,
    refuse_reconstruction,
    refuse_trained,
    task_identity,
)
from cascade_train.assembly.components import build_component, build_parts
from cascade_train.assembly.model import compute_dtype
from cascade_train.assembly.samples import read_sample_prompts
from cascade_train.batch import Batch
from cascade_train.config.saved import to_plain
from cascade_train.data.cached import (
    Cached,
    CachedSample,
    CacheManifest,
    is_whole,
    load_table,
    write_manifest,
    write_unit,
)
from cascade_train.data.data_set import Rows, open_data_set
from cascade_train.data.index.rows import Index
from cascade_train.data.loading.worker import MicroBatches, Results
from cascade_train.data.order.plan import Step
from cascade_train.data.sample import FEW, RawSample, too_many_text
from cascade_train.data.source import Source
from cascade_train.distributed.process_group import first_device
from cascade_train.distributed.rng import allow_tf32
from cascade_train.errors import ConfigError, RunError
from cascade_train.files.durable import remove_abandoned
from cascade_train.models.stage import Stage
from cascade_train.tasks.base import ImageMaker, Task
from cascade_train.tasks.prepared import latent_mask

LIBRARIES = ("cascade-train", "torch", "torchvision", "transformers", "diffusers", "numpy", "pillow")
"""Whose versions a manifest records."""

WAITING = "Pictures are read for the cache; data.num_workers reads more of them at once."

Pictures = tuple[Batch, Mapping[int, RawSample]]

_log = logging.getLogger(__name__)


def make_cache(
    cfg: DictConfig,
    *,
    out: str,
    captions: bool,
    dtype: str | None,
    unit_samples: int,
    batch_size: int,
    task_index: int,
    task_count: int,
) -> str:
    """Make this process's units of a cache and return a summary; arguments as in `CacheArgs`."""
    allow_tf32()  # as a training has it
    read_sample_prompts(cfg)
    parts, source = build_parts(cfg), build_component(cfg, "data")
    stage, task = parts.stage, parts.task
    if isinstance(source, Cached):
        raise ConfigError(f"data.path={source.path} is a cache already. Name the data that it was made of.")
    refuse_random(stage, task, source, captions=captions)
    data = open_data_set(source, share=None, held_out=None, transform=task.sample_transform()).training
    if not data.index.rows_are_samples:
        raise ConfigError("data: what is streamed cannot be cached, since its samples are not known beforehand.")
    refuse_drawn_captions(source, data.rows, captions=captions)
    encoder = Encoder.build(stage, task, compute_dtype(cfg), has_captions=captions, dtype=dtype, batch_size=batch_size)
    index = sized_index(source, data.index, data.rows)
    manifest = describe(to_plain(cfg), encoder, data, index, unit_samples)
    folder = Path(out)
    manifest, stale = write_manifest(folder, manifest, index, on_change=source.on_change)
    remove_abandoned(folder)
    mine = range(task_index, manifest.units, task_count)
    todo = [unit for unit in mine if unit in stale or not is_whole(folder, unit, manifest)]
    _log.info("%d of %d units are there already.", len(mine) - len(todo), len(mine))
    reader = PictureReader(data, index, seed=cfg.run.seed)
    prompts = ["", cfg.sample.negative_prompt, *(cfg.sample.prompts or [])]
    fill(folder, manifest, todo, encoder=encoder, reader=reader, prompts=prompts)
    for notice in stage.notices():
        _log.warning("%s", notice)
    return summary(folder, manifest)


def refuse_random(stage: Stage, task: Task, source: Source, *, captions: bool) -> None:
    """Refuse settings whose outputs differ from epoch to epoch."""
    if not stage.image_products:
        raise ConfigError(f"model: nothing of {stage.name} can be cached: {stage.why_not_cached}")
    refuse_reconstruction(stage, task, "so that nothing can be cached for it")
    flips, share = source.flip_prob, source.buckets.random_share
    rules = (
        ("crop=random", source.crop == "random", "data.crop=center"),
        (f"flip_prob={flips}", flips > 0.0, "data.flip_prob=0"),
        (f"buckets.random_share={share}", share > 0.0, "data.buckets.random_share=0"),
    )
    for setting, broken, remedy in rules:
        if broken:
            raise ConfigError(f"data.{setting} draws anew each epoch, which a cache cannot hold: set {remedy}.")
    products = {**stage.image_products, **(stage.caption_products if captions else {})}
    refuse_trained(task.trained_parts() & frozenset(products.values()), "a cache would hold what it made at first")


def refuse_drawn_captions(source: Source, rows: np.ndarray, *, captions: bool) -> None:
    """Refuse captions that change from epoch to epoch, or that the run could not make again."""
    kinds = list({id(kind): kind for kind in map(source.captions_of, rows.tolist())}.values())
    if captions and not all(kind.is_constant for kind in kinds):
        text = "data.captions draws anew each epoch, which a cache cannot hold"
        raise ConfigError(f"{text}: make the cache with captions=false, or set what is drawn to a fixed choice.")
    if not captions and any(kind is not source.captions for kind in kinds):
        text = "captions=false keeps captions as they are read, but the joined sources have data.captions of their own"
        raise ConfigError(f"{text}: make the cache with captions=true, or one cache of each source.")


def sized_index(source: Source, index: Index, rows: np.ndarray) -> Index:
    """Index with the sizes that pictures are trained at, 0 where a row takes no part."""
    buckets, table = source.bucket_table(index), index.table.copy()
    bucket_N = buckets.nearest(table["width"].astype(np.int64), table["height"].astype(np.int64))
    takes_part = np.isin(np.arange(len(index)), rows)
    table["height"], table["width"] = np.where(takes_part, buckets.sizes_K2[bucket_N].T, 0)
    return replace(index, table=table)


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The encoders of a stage and a task, and the form in which their outputs are cached."""

    stage: Stage  # built, without parts that encode nothing
    maker: ImageMaker | None  # makes a task's own tensors of images; None = it has none
    device: torch.device  # of the stage
    has_captions: bool  # whether outputs of the text encoder are cached
    dtype: str | None  # "bf16", or None = as the encoders make them
    batch_size: int  # samples encoded at once

    @classmethod
    def build(cls, stage: Stage, task: Task, compute: torch.dtype, *, has_captions: bool, **form: Any) -> Encoder:
        """Build the encoders; a ConfigError for other weights, or a task of random maps."""
        device = first_device()
        text = frozenset() if has_captions else frozenset(stage.caption_products.values())
        stage.left_out = stage.encodes_nothing | text
        stage.build(device=device, network_dtype=compute, frozen_dtype=compute)
        maker = task.image_maker(stage, device)
        return cls(stage=stage, maker=maker, device=device, has_captions=has_captions, **form)

    def images(self, batch: Batch) -> list[dict[str, Tensor]]:
        """Cached tensors of each picture, by name, on the host; a mask if parts do not count."""
        assert batch.image_BCHW is not None, "pictures are read from their source"
        image_BCHW = batch.image_BCHW.to(self.device, non_blocking=True).float() / 255
        products = self.stage.make_image_products(image_BCHW)
        if self.maker is not None:
            products |= self.maker(image_BCHW, batch.to(self.device).tensors)
        tensors = {name: self._kept(tensor) for name, tensor in products.items()} | self.stage.picture_facts(batch)
        kept = [{name: tensor[i] for name, tensor in tensors.items()} for i in range(len(batch))]
        if "mask" in batch.tensors:
            mask_B1hw = latent_mask(batch.tensors["mask"], self.stage.latent_shape(*image_BCHW.shape[-2:]))
            for sample, mask_1hw in zip(kept, mask_B1hw, strict=True):
                if mask_1hw.min() < 1.0:
                    sample["mask"] = mask_1hw
        return kept

    def captions(self, captions: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Cached tensors of each caption, on the host; none if captions are not cached."""
        outputs: dict[str, dict[str, Tensor]] = {}
        for start in range(0, len(captions) if self.has_captions else 0, self.batch_size):
            part = captions[start : start + self.batch_size]
            kept = {name: self._kept(tensor) for name, tensor in self.stage.make_caption_products(part).items()}
            outputs |= {caption: {name: kept[name][i] for name in kept} for i, caption in enumerate(part)}
        return outputs

    def _kept(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", torch.bfloat16 if self.dtype == "bf16" else tensor.dtype)


def describe(cfg: Mapping[str, Any], encoder: Encoder, data: Rows, index: Index, unit_samples: int) -> CacheManifest:
    """Manifest of a cache, its forms by encoding a black square and the empty caption."""
    source, transform = data.source, data.transform
    size, stage = source.image_size, encoder.stage
    black, zero_1 = np.zeros((3, size, size), dtype=np.uint8), torch.zeros(1, dtype=torch.int64)
    extra = {} if transform is None else transform(black, torch.Generator().manual_seed(0))
    tensors = {name: torch.from_numpy(array)[None] for name, array in extra.items()}
    one: dict[str, Any] = {"captions": ("",), "keys": ("",), "epoch_B": zero_1, "index_B": zero_1, "seed": 0}
    one |= {"original_size_B2": torch.tensor([[size, size]]), "crop_B4": torch.tensor([[0, 0, size, size]])}
    batch = Batch(image_BCHW=torch.from_numpy(black)[None], tensors=tensors, **one)
    captions = encoder.captions([""]).get("", {})
    identity = encoder_identity(cfg, stage, [*stage.image_products, *captions]) | data_identity(cfg)
    if data.index.metadata:
        identity["data.metadata"] = data.index.metadata
    return CacheManifest(
        rows=len(index),
        unit_samples=unit_samples,
        index=index.digest,
        filters=index.filters,
        sizes=source.bucket_table(data.index).sizes_K2.tolist(),
        tensors={name: _form(tensor) for name, tensor in encoder.images(batch)[0].items()},
        captions={name: _form(tensor) for name, tensor in captions.items()},
        identity=identity if encoder.maker is None else identity | task_identity(cfg),
        made_with={library: version(library) for library in LIBRARIES},
    )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape))}"


def rows_by_size(table: np.ndarray, rows: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
    """Rows of each (height, width) in pixels, in their order."""
    heights, widths = table["height"][rows].astype(np.int64), table["width"][rows].astype(np.int64)
    sizes = np.unique(np.stack([heights, widths], axis=1), axis=0).tolist()
    return {(height, width): rows[(heights == height) & (widths == width)] for height, width in sizes}


class PictureReader(MicroBatches):
    """Reads the pictures of rows in worker processes, just as training does in its first epoch."""

    def __init__(self, data: Rows, sizes: Index, *, seed: int) -> None:
        self.source, self.content, self._rows_of = data.source, sizes.content, rows_by_size(sizes.table, data.rows)
        self._raw: dict[int, RawSample] = {}
        super().__init__(data.source, data.index, self._rows_of, seed, data.transform)

    def __getitem__(self, step: Step) -> Pictures | RunError:  # type: ignore[override]
        """A batch of one size, with stand-ins, and the samples of the source by row."""
        self._raw = {}
        batch = super().__getitem__(step)
        return batch if isinstance(batch, RunError) else (batch, self._raw)

    def read(self, row: int) -> RawSample:
        """Read a sample, and keep all of it but the picture."""
        raw = super().read(row)
        self._raw[row] = replace(raw, image=None, mask=None)
        return raw

    def steps(self, rows: range, batch_size: int) -> list[Step]:
        """Which pictures of some rows are read together: those of one size."""
        steps = []
        for (height, width), members in self._rows_of.items():
            start, stop = np.searchsorted(members, (rows.start, rows.stop))
            for first in range(start, stop, batch_size):
                part = members[first : min(stop, first + batch_size)]
                steps.append(Step(rows=part, epochs=np.zeros(len(part), dtype=np.int64), height=height, width=width))
        return steps


def fill(
    folder: Path,
    manifest: CacheManifest,
    units: Sequence[int],
    *,
    encoder: Encoder,
    reader: PictureReader,
    prompts: Sequence[str],
) -> None:
    """Make units and write each at once. A RunError where too many pictures are unreadable."""
    steps = {unit: reader.steps(manifest.rows_of(unit), encoder.batch_size) for unit in units}
    references = [step for unit in units for step in steps[unit]]
    pictures = Results[Pictures](reader, reader.source, references=references, whereabouts=lambda: WAITING)  # type: ignore[arg-type]
    seen, unreadable = 0, list[str]()
    for number, unit in enumerate(units, start=1):
        started, samples = time.monotonic(), dict[int, CachedSample]()
        for step in steps[unit]:
            batch, raw = pictures.next()
            samples |= keep_readable(encoder, batch, raw, step)
            seen += len(step.rows)
            unreadable += map(str, batch.skipped)
        refuse_unreadable(list(dict.fromkeys(unreadable)), seen, reader.source.max_unreadable_share)
        texts = dict.fromkeys([*prompts, *(str(sample.meta["caption"]) for sample in samples.values())])
        encoded, content = encoder.captions(list(texts)), reader.content[list(manifest.rows_of(unit))]
        write_unit(folder, unit, manifest, samples=samples, captions=encoded, content=content)
        rate = len(samples) / (time.monotonic() - started)
        _log.info("Unit %d written, %d of %d: %.1f samples per second.", unit, number, len(units), rate)


def keep_readable(encoder: Encoder, batch: Batch, raw: Mapping[int, RawSample], step: Step) -> dict[int, CachedSample]:
    """Requested samples as they are cached, without the stand-ins of others."""
    tensors, kept = encoder.images(batch), {}
    for place, row in enumerate(step.rows.tolist()):
        if int(batch.index_B[place]) != row:
            continue
        sample, has_captions = raw[row], encoder.has_captions
        caption, values = (batch.captions[place], {}) if has_captions else (sample.caption, sample.values)
        weight = 1.0 if batch.weight_B is None else float(batch.weight_B[place])
        meta = {"caption": caption, "key": batch.keys[place], "weight": weight, "values": values}
        kept[row] = CachedSample(tensors=tensors[place], meta=meta)
    return kept


def refuse_unreadable(names: Sequence[str], seen: int, share: float) -> None:
    """Raise a RunError where more samples are unreadable than the run allows, a few aside."""
    if len(names) > FEW + share * seen:
        raise RunError(too_many_text(len(names), seen, share, "; ".join(names[:20])))
    if names:
        _log.warning("%d pictures are unreadable so far and are left out: %s", len(names), "; ".join(names[:5]))


def summary(folder: Path, manifest: CacheManifest) -> str:
    """A cache's size and how to use it."""
    tables = [load_table(folder, unit, manifest) for unit in range(manifest.units)]
    done = [table for table in tables if table is not None]
    samples = sum(int((table.samples["bytes"].min(axis=1) > 0).sum()) for table in done)
    size = sum(int(table.tar_bytes.sum()) for table in done)
    content = f"{samples} samples in {size / 2**20:.1f} MiB, {size / max(1, samples) / 1000:.1f} kB each"
    if len(done) < manifest.units:
        return f"{len(done)} of {manifest.units} units lie in {folder}: {content}."
    return f"The cache in {folder} is complete: {content}. Train with data=cached data.path={folder}"
