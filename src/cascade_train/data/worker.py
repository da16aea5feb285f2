"""What runs in a worker process: references in, a finished batch or the reason of a failure out.

A worker holds no state: the same references give the same batch in any process.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from cascade_train.batch import Batch, SampleTransform, Unreadable, sample_seed
from cascade_train.data.decode import decode
from cascade_train.data.index import Index
from cascade_train.data.plan import Step
from cascade_train.data.sample import UnreadableSampleError
from cascade_train.data.source import Source
from cascade_train.errors import RunError

MAX_STAND_INS = 16


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a batch could not be made.

    Attributes:
        text: the sample and the cause, for the user.
        trace: the worker's traceback, for a defect.
    """

    text: str
    trace: str


@dataclass(frozen=True, kw_only=True)
class _Sample:
    image: np.ndarray
    caption: str
    key: str
    row: int
    weight: float
    tensors: dict[str, np.ndarray]
    skipped: tuple[Unreadable, ...]


class MicroBatches(Dataset[Batch | Failure]):
    """Batches by their references.

    Args:
        source: the opened source.
        index: what `source.open` returned.
        rows: (N,) rows that take part, sorted; stand-ins for unreadable samples come from them.
        seed: the run's seed.
        crop: which square of a picture.
        transform: what is made of each picture for the task; None = nothing.
    """

    def __init__(
        self,
        source: Source,
        index: Index,
        rows: np.ndarray,
        seed: int,
        crop: Literal["center", "random"],
        transform: SampleTransform | None = None,
    ) -> None:
        self._source, self._index, self._rows = source, index, rows
        self._seed, self._crop, self._transform = seed, crop, transform

    def __getitem__(self, step: Step) -> Batch | Failure:
        """Read, decode and stack the samples of one micro-batch."""
        samples = []
        for row, epoch in zip(step.rows.tolist(), step.epochs.tolist(), strict=True):
            try:
                samples.append(self._sample(row, epoch, step))
            except Exception as error:  # crosses a process border as text, raised again there
                cause = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
                return Failure(text=f"sample {self._index.name(row)}: {cause}", trace=traceback.format_exc())
        return Batch(
            image_BCHW=torch.from_numpy(np.stack([sample.image for sample in samples])),
            captions=tuple(sample.caption for sample in samples),
            keys=tuple(sample.key for sample in samples),
            epoch_B=torch.from_numpy(step.epochs.copy()),
            index_B=torch.tensor([sample.row for sample in samples], dtype=torch.int64),
            seed=self._seed,
            weight_B=torch.tensor([sample.weight for sample in samples], dtype=torch.float32),
            tensors=_stacked([sample.tensors for sample in samples]),
            skipped=tuple(each for sample in samples for each in sample.skipped),
        )

    def _sample(self, row: int, epoch: int, step: Step) -> _Sample:
        """Return the row's sample, or the next row's that is readable."""
        skipped: list[Unreadable] = []
        place = int(np.searchsorted(self._rows, row))
        for candidate in self._rows.take(range(place, place + MAX_STAND_INS), mode="wrap").tolist():
            try:
                raw = self._source.read(candidate)
                caption = self._source.captions_of(candidate)(raw, self._generator(candidate, epoch, "caption"))
                image = decode(raw.image, step.height, step.width, offset=self._crop_offset(candidate, epoch))
            except UnreadableSampleError as error:
                skipped.append(Unreadable(self._index.name(candidate), str(error)))
                continue
            return _Sample(
                image=image,
                caption=caption,
                key=raw.key,
                row=candidate,
                weight=raw.weight,
                tensors={**raw.tensors, **self._transformed(image, candidate, epoch)},
                skipped=tuple(skipped),
            )
        raise RunError(f"unreadable, and so are the samples after it: {'; '.join(map(str, dict.fromkeys(skipped)))}")

    def _crop_offset(self, row: int, epoch: int) -> tuple[float, float]:
        if self._crop == "center":
            return 0.5, 0.5
        across, down = torch.rand(2, generator=self._generator(row, epoch, "crop")).tolist()
        return across, down

    def _transformed(self, image: np.ndarray, row: int, epoch: int) -> Mapping[str, np.ndarray]:
        return {} if self._transform is None else self._transform(image, self._generator(row, epoch, "transform"))

    def _generator(self, row: int, epoch: int, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(sample_seed(self._seed, epoch, row, purpose))


def _stacked(arrays: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.stack([sample[name] for sample in arrays])) for name in arrays[0]}
