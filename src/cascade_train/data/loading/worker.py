"""Worker processes: from references to finished batches or failures, in order.

A worker has no state: the same references give the same batch in any process.
"""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from cascade_train.batch import Batch, SampleTransform, Unreadable, sample_seed
from cascade_train.data.decoding.decode import fast_jpeg_decoder
from cascade_train.data.decoding.framing import Framed, Framing
from cascade_train.data.index.rows import Index
from cascade_train.data.order.plan import Step
from cascade_train.data.sample import RawSample, UnreadableSampleError, by_reason
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError, RunError, line_of_user
from cascade_train.signals import STOP_SIGNALS

MAX_STAND_INS = 16
WAIT_WARNING_SECONDS = 60.0
"""How often a wait for one batch is logged."""

T = TypeVar("T")
_torchs_handler: Any = None  # of SIGCHLD; None until a process has had workers
_log = logging.getLogger(__name__)


def failure(what: str, error: Exception) -> RunError:
    """The error being handled, as one that may cross processes, its traceback as a note."""
    cause = str(error) if isinstance(error, ConfigError | RunError) else f"{type(error).__name__}: {error}"
    return _traced(f"{what}: {line_of_user(error)}{cause}")


def _traced(text: str) -> RunError:
    error = RunError(text)
    error.add_note(traceback.format_exc())
    return error


@dataclass(frozen=True, kw_only=True)
class _Sample:
    row: int
    raw: RawSample  # with the caption and the tensors of the batch
    framed: Framed | None
    skipped: tuple[Unreadable, ...]


class MicroBatches(Dataset[Batch | RunError]):
    """Batches by their references.

    An unreadable sample finds its stand-in among `stand_ins`, the sorted rows of each shape, (height, width), first in
    its own. Samples whose keys are in `excluded` are replaced without a report, although they can be read.
    """

    def __init__(
        self,
        source: Source,
        index: Index,
        stand_ins: Mapping[tuple[int, int], np.ndarray],
        seed: int,
        transform: SampleTransform | None = None,
        excluded: Collection[str] = (),
    ) -> None:
        self._source, self._index, self._stand_ins = source, index, stand_ins
        self._seed, self._transform, self._excluded = seed, transform, excluded
        self._framing = Framing(crop=source.crop, flip_prob=source.flip_prob, max_pixels=source.max_pixels)

    def __getitem__(self, step: Step) -> Batch | RunError:
        self._source.prefetch(step.rows.tolist())
        samples = []
        for row, epoch in zip(step.rows.tolist(), step.epochs.tolist(), strict=True):
            try:
                samples.append(self._sample(row, epoch, step))
            except Exception as error:  # raised again in the main process
                return failure(f"sample {self.name(row)}", error)
        weight_B = torch.tensor([sample.raw.weight for sample in samples], dtype=torch.float32)
        return Batch(
            captions=tuple(sample.raw.caption for sample in samples),
            keys=tuple(sample.raw.key for sample in samples),
            epoch_B=torch.from_numpy(step.epochs.copy()),
            index_B=torch.tensor([sample.row for sample in samples], dtype=torch.int64),
            seed=self._seed,
            weight_B=weight_B if step.weights is None else weight_B * torch.from_numpy(step.weights),
            skipped=tuple(unreadable for sample in samples for unreadable in sample.skipped),
            **_stacked(samples),
        )

    def read(self, row: int) -> RawSample:
        """See `Source.read`."""
        return self._source.read(row)

    def name(self, row: int) -> str:
        """A sample's name in messages."""
        return self._index.name(row)

    def _sample(self, row: int, epoch: int, step: Step) -> _Sample:
        """The row's sample, or that of another row that is readable and not excluded."""
        skipped: list[Unreadable] = []
        for candidate in self._candidates(row, step):
            if len(skipped) == MAX_STAND_INS:
                break
            try:
                sample = self._made(candidate, epoch, step)
            except UnreadableSampleError as error:
                skipped.append(Unreadable(self.name(candidate), str(error)))
                continue
            except Exception as error:
                if candidate == row:
                    raise
                raise failure(f"its stand-in {self.name(candidate)}", error) from None
            if sample is not None:
                return replace(sample, skipped=tuple(skipped))
        if not skipped:
            raise RunError("left out by data.exclude, and so is every other sample")
        if not any(map(len, self._stand_ins.values())):
            raise RunError(skipped[0].reason)
        raise RunError(f"unreadable, and so are the samples after it: {by_reason(skipped)}")

    def _made(self, row: int, epoch: int, step: Step) -> _Sample | None:
        """Read and frame a row; None = it is excluded."""
        raw = self.read(row)
        if raw.key in self._excluded:
            return None
        draws = partial(self._generator, row, epoch)
        caption = self._source.captions_of(row)(raw, draws("caption"))
        framed, tensors = None, raw.tensors  # without a picture, what is made of it is among the tensors
        if raw.image is not None:
            framed = self._framing(raw.image, raw.mask, step.height, step.width, draws)
        if framed is not None and self._transform is not None:
            tensors = {**tensors, **self._transform(framed.image, draws("transform"))}
        if framed is not None and framed.mask is not None:
            tensors = {**tensors, "mask": framed.mask}
        raw = replace(raw, image=None, mask=None, caption=caption, tensors=tensors)
        return _Sample(row=row, raw=raw, framed=framed, skipped=())

    def _candidates(self, row: int, step: Step) -> Iterator[int]:
        """Yield the row, those of its shape from the next one on, and then all others."""
        same = self._stand_ins[step.height, step.width]
        place = int(np.searchsorted(same, row, side="right"))
        yield from itertools.chain([row], (int(same[(place + i) % len(same)]) for i in range(len(same))))
        for others in self._stand_ins.values():
            yield from others.tolist()

    def _generator(self, row: int, epoch: int, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(sample_seed(self._seed, epoch, row, purpose))


def _stacked(samples: list[_Sample]) -> dict[str, Any]:
    names = dict.fromkeys(name for sample in samples for name in sample.raw.tensors)
    tensors = {name: _tensor(name, [sample.raw.tensors.get(name) for sample in samples]) for name in names}
    framed = [sample.framed for sample in samples if sample.framed is not None]
    if not framed:
        return {"image_BCHW": None, "tensors": tensors}
    images = default_collate([torch.from_numpy(part.image) for part in framed])  # in a worker, in shared memory
    boxes = [(part.box.top, part.box.left, part.box.height, part.box.width) for part in framed]
    return {
        "image_BCHW": images.contiguous(),
        "tensors": tensors,
        "original_size_B2": torch.tensor([part.size for part in framed], dtype=torch.int64),
        "crop_B4": torch.tensor(boxes, dtype=torch.int64),
        "flipped_B": torch.tensor([part.flipped for part in framed], dtype=torch.bool),
    }


def _tensor(name: str, arrays: list[Any]) -> torch.Tensor:
    if name == "mask":  # a sample without one counts everywhere
        known = next(array for array in arrays if array is not None)
        whole = np.full_like(known, 255 if known.dtype == np.uint8 else 1)
        arrays = [whole if array is None else array for array in arrays]
    return torch.from_numpy(np.stack(arrays))


class Results(Generic[T]):
    """Results of worker processes in the order of references; waits are logged each minute."""

    def __init__(
        self,
        dataset: Dataset[T | RunError],
        source: Source,
        *,
        references: Iterable[Any] | None = None,
        workers: int | None = None,
        whereabouts: Callable[[], str] = str,
    ) -> None:
        """Store; no worker starts yet.

        The dataset is asked for `references`; None = it is iterated, by workers that start anew each time. Without
        `workers` it has the source's number. `whereabouts` returns where samples went, for a message about a wait.
        """
        workers = source.num_workers if workers is None else workers
        if workers > 0:
            fast_jpeg_decoder()  # loaded once, before the workers fork
        self._whereabouts = whereabouts
        self._iterator: Iterator[T | RunError] | None = None
        self._data_loader: DataLoader[T | RunError] | None = None
        self._make: Callable[[], DataLoader[T | RunError]] | None = partial(
            _Loader,
            dataset,
            batch_size=None,
            sampler=references,
            collate_fn=_unchanged,
            num_workers=workers,
            persistent_workers=workers > 0 and references is not None,
            multiprocessing_context=source.worker_start if workers > 0 else None,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=begin_worker,
            timeout=(source.max_wait_seconds or 0.0) if workers > 0 else 0.0,
        )

    def next(self) -> T:
        """The next result; a RunError where a worker could not make it, ended, or took too long."""
        result = self._receive()
        if isinstance(result, RunError):
            raise result
        return result

    def restart(self) -> None:
        """Drop what was prefetched; the next result is made of the first reference."""
        self._iterator = None

    def close(self) -> None:
        """End the worker processes; no result can be asked for afterwards."""
        self._iterator = self._data_loader = self._make = None

    def _receive(self) -> T | RunError:
        """What the workers made next; their sudden end is a failure too."""
        assert self._make is not None, "the feed is closed"
        if self._data_loader is None:
            self._data_loader = self._make()
        if self._data_loader.num_workers > 0:
            shorten_socket_paths()
        timeout, begun = self._data_loader.timeout, time.monotonic()
        try:
            with _raised_deaths():
                if self._iterator is None:
                    end_workers_with_this_process()
                    self._iterator = iter(self._data_loader)
                with _logged_wait(self._whereabouts):
                    return next(self._iterator)
        except KeyboardInterrupt:  # a stop signal
            for worker in getattr(self._iterator, "_workers", ()):
                worker.kill()  # it may hang
            self._iterator = None
            raise
        except (RuntimeError, OSError, EOFError) as error:
            self._iterator = None
            text = f"A data worker process ended unexpectedly ({str(error).rstrip('. ')}), perhaps for lack of memory"
            text = f"{text} or shared memory: lower data.num_workers, or set it to 0 to see the cause"
            if 0 < timeout <= time.monotonic() - begun:
                text = f"no batch for {timeout:g} s (data.max_wait_seconds). {self._whereabouts()}"
            return _traced(text)


class _Loader(DataLoader[T]):
    """Without torch's advice of as many workers as cores: they wait for files as often as they decode."""

    def check_worker_number_rationality(self) -> None:
        """Check nothing: each log line has the share of time that the loop waits for data."""


@contextmanager
def _raised_deaths() -> Iterator[None]:
    """Let torch raise the death of a worker, also one since the last block, within the block alone."""
    global _torchs_handler
    if threading.current_thread() is not threading.main_thread():  # where Python allows no handlers
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    if _torchs_handler is not None:
        signal.signal(signal.SIGCHLD, _torchs_handler)
        _torchs_handler(signal.SIGCHLD, None)
    try:
        yield
    finally:
        now = signal.getsignal(signal.SIGCHLD)  # torch sets its own with the first workers of a process
        if now is not before:
            _torchs_handler = now
            signal.signal(signal.SIGCHLD, before)


@contextmanager
def _logged_wait(whereabouts: Callable[[], str]) -> Iterator[None]:
    """Log a warning once a minute while the body runs; `whereabouts` is called in another thread."""
    done = threading.Event()

    def watch() -> None:
        minutes = 0
        while not done.wait(WAIT_WARNING_SECONDS):
            minutes += 1
            _log.warning("No batch for %g s. %s", minutes * WAIT_WARNING_SECONDS, whereabouts())

    watcher = threading.Thread(target=watch, name="logged wait", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()  # no thread is left when a feed starts processes


def begin_worker(worker: int) -> None:
    """Ignore stop signals, which terminals, torchrun and SLURM send to all processes, and freeze inherited objects.

    A process group that the collector of a forked worker destroys waits for threads that do not exist there.
    """
    gc.freeze()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


LONGEST_FOLDER = 70
"""Bytes of the folder of temporary files: Linux allows 107 for a socket in it, of which multiprocessing needs 32."""


@functools.cache
def shorten_socket_paths() -> None:
    """Let the sockets by which processes pass tensors lie in /tmp where TMPDIR is too long for them."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) <= LONGEST_FOLDER:
        return
    tempfile.tempdir = "/tmp"  # noqa: S108
    try:
        multiprocessing.util.get_temp_dir()  # kept for this process, and those that it starts
    except OSError as error:
        text = f"TMPDIR={folder} is too long for the sockets of data workers, and /tmp cannot be used ({error})"
        raise RunError(f"{text}. Set it to at most {LONGEST_FOLDER} bytes, or data.num_workers=0") from error
    finally:
        tempfile.tempdir = folder


@functools.cache
def end_workers_with_this_process() -> None:
    """Have workers that are left when this process exits killed, since they ignore milder signals."""
    atexit.register(_kill_children)


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()


def _unchanged(result: Any) -> Any:
    return result
