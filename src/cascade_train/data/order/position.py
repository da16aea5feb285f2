"""The plan of one run's samples, and saved positions in it, with the identity of everything that decides the order.

One that does not fit is refused, or, by `data.on_change=restart`, followed by another epoch; never silently.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from cascade_train.batch import SampleTransform
from cascade_train.data.buckets import BucketTable
from cascade_train.data.index.rows import Index, changed_content, rows_digest
from cascade_train.data.order.plan import ORDER_VERSION, Groups, Layouts, Plan, Start, Step, group, shard_numbers
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError

_REMEDIES = {
    "metadata": "captions came from elsewhere than these metadata files; put them back, or set data.metadata=false",
    "filters": "data.row_filters changed; set it back",
    "index": "the files behind data changed; put them back",
    "rows": "other samples take part: set validate.share, data.size_filters, data.quarantine and data.buckets back",
    "seed": "set run.seed back",
    "window": "set data.shuffle_window_shards back",
    "buckets": "set data.aspect_ratios and data.buckets back",
    "replacement": "set data.replacement back",
    "order": "this version of the library orders samples in another way; use the version that wrote the checkpoint",
}
_AT_ONCE = 2**20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class FeedRequest:
    """The samples of one rank's feed, and how they are batched."""

    index: Index  # what `Source.open` returned
    rows: np.ndarray  # those of the index that take part, sorted
    seed: int  # the run's
    global_batch_size: int  # samples of one optimizer step over all ranks
    micro_batch_size: int  # samples of one forward pass on one rank
    rank: int  # this process, from 0
    ranks: int
    rows_digest: str = ""  # that of `rows_digest`; empty = computed
    transform: SampleTransform | None = None  # what the workers make of each picture for the task
    whole_epochs: bool = False
    """Every sample comes once an epoch in its own shape, whatever the source's replacement and random_share;
    what fills up a batch has weight 0. For validation and for showing."""
    gather: Callable[[Any], list[Any]] | None = None
    """Collects a value of every rank, in rank order, for streams; None = one rank."""

    def __post_init__(self) -> None:
        if not self.rows_digest:
            object.__setattr__(self, "rows_digest", rows_digest(self.rows))


@dataclass(frozen=True, kw_only=True)
class ShapeGroups:
    """Rows of an index by the sizes that they are trained at."""

    buckets: BucketTable
    groups: Groups
    enlarged: int  # samples that are scaled up to cover theirs
    enlarged_by: float  # by how much at most

    @classmethod
    def of(cls, source: Source, index: Index, rows: np.ndarray, rows_digest: str) -> ShapeGroups:
        """Group sorted rows of the index of a source, of which a large one keeps the groups."""
        buckets = source.bucket_table(index)
        make = partial(_group, index.table, rows, buckets)
        parts = index.kept("shapes", f"{rows_digest}/{buckets.identity}", make)
        count, most = parts["enlarged"].tolist()
        groups = Groups(parts["rows"], np.array(parts["count_KS"]))
        return cls(buckets=buckets, groups=groups, enlarged=int(count), enlarged_by=most)


def _group(table: np.ndarray, rows: np.ndarray, buckets: BucketTable) -> dict[str, np.ndarray]:
    bucket_N, enlarged, most = np.empty(len(rows), dtype=np.uint16), 0, 0.0
    for start in range(0, len(rows), _AT_ONCE):  # the memory of fp64 is of one block alone
        part = slice(start, start + _AT_ONCE)
        width_N, height_N = (table[name][rows[part]] for name in ("width", "height"))
        nearest_N = buckets.nearest(width_N, height_N)
        scale_N = buckets.enlargement(nearest_N, width_N, height_N)
        bucket_N[part] = nearest_N
        enlarged, most = enlarged + int((scale_N > 1).sum()), max(most, float(scale_N.max()))
    groups = group(rows, shard_numbers(table["shard"][rows]), bucket_N, len(buckets.sizes_K2))
    return {"rows": groups.rows, "count_KS": groups.count_KS, "enlarged": np.array([enlarged, most])}


def read_identity(state: Mapping[str, Any]) -> dict[str, str]:
    """What a saved position says of its order, by name; joined sources have the filters of each, with spaces."""
    return dict(re.findall(r"(\w+)=(.*?)(?= \w+=|$)", state["identity"]))


class Order:
    """Global batches by position, and the state of a position, of the samples of a request, at least one."""

    def __init__(self, source: Source, request: FeedRequest) -> None:
        self._index, self._rows = index, rows = request.index, request.rows
        self._on_change, self._max_upscale = source.on_change, source.buckets.max_upscale
        self._global_batch_size = request.global_batch_size
        self._leftover: Literal["carry", "flush"] = "flush" if request.whole_epochs else "carry"
        replacement = source.replacement and not request.whole_epochs
        random_share = 0.0 if request.whole_epochs else source.buckets.random_share
        self._shapes_of_rows = shapes = ShapeGroups.of(source, index, rows, request.rows_digest)
        self._layouts = Layouts(
            buckets=shapes.buckets,
            table=index.table,
            rows=rows,
            own=shapes.groups,
            seed=request.seed,
            window_shards=source.shuffle_window_shards,
            replacement=replacement,
            random_share=random_share,
        )
        self._plan = self._plan_from(request.global_batch_size, Start())
        identity = {
            "order": str(ORDER_VERSION),
            "index": index.digest,
            "rows": request.rows_digest,
            "seed": str(request.seed),
            "window": str(source.shuffle_window_shards),
            "metadata": index.metadata,
            "filters": index.filters,
            "buckets": f"{shapes.buckets.identity}/{random_share:g}" if len(shapes.buckets.sizes_K2) > 1 else "",
            "replacement": "true" if replacement else "",
        }
        self._identity = {name: value for name, value in identity.items() if value}

    def step(self, position: int) -> Step:
        """Global batch at `position`, counted from the run's first."""
        return self._plan.step(position)

    def stand_ins(self) -> dict[tuple[int, int], np.ndarray]:
        """Sorted rows of each shape, (height, width), that may replace unreadable ones."""
        sizes, groups = map(tuple, self._layouts.sizes_K2.tolist()), self._layouts.own
        rows_of = {size: groups.of_bucket(bucket) for bucket, size in enumerate(sizes)}
        return {shape: rows if len(rows) else self._rows for shape, rows in rows_of.items()}

    def steps_of_epochs(self, epochs: int, state: Mapping[str, Any] | None = None) -> int:
        """Step that completes the first `epochs` epochs, of a run that continues at `state` or begins (None)."""
        start = Start()
        restarts = self._on_change == "restart"
        if state is not None and (restarts or not self._changed_order(state)):  # else `restore` refuses it
            start = self._start_of(state, is_changed=restarts and bool(self._changes(state)))
            if self._plan_from(self._global_batch_size, Start()).epoch_start(start.position) == start:
                start = Start()  # nothing has changed since the run began
        if self._leftover == "carry":
            samples = (epochs - start.epoch) * len(self._rows) - sum(start.taken)
            return start.position + max(0, -(-samples // self._global_batch_size))
        return self._plan_from(self._global_batch_size, start).first_step(epochs)

    def state(self, position: int) -> dict[str, Any]:
        """A position with the identity of its order."""
        start = self._plan.epoch_start(position)
        return {
            "position": position,
            "identity": " ".join(f"{name}={value}" for name, value in self._identity.items()),
            "global_batch_size": self._global_batch_size,
            "content": self._index.content_record,
            "start": {"position": start.position, "epoch": start.epoch, "taken": list(start.taken)},
        }

    def restore(self, state: Mapping[str, Any]) -> int:
        """Continue the plan that `state` belongs to, and return its position. Raises as `Feed.load_state_dict`."""
        changed, size = self._changes(state), state["global_batch_size"]
        if changed and self._on_change == "refuse":
            text = f"the checkpoint's data position does not fit this run's data: {changed[0]}"
            raise ConfigError(f"{text}, or start another run, or end the epoch here by data.on_change=restart")
        if size != self._global_batch_size and self._on_change == "refuse":
            text = f"the checkpoint's data position counts global batches of {size} samples, but"
            text = f"{text} train.global_batch_size={self._global_batch_size}: set it back, or start another run"
            raise ConfigError(f"{text}, or continue with other batches by data.on_change=restart")
        start = self._start_of(state, is_changed=bool(changed))
        if changed:
            _log.warning("The data changed (%s); epoch %d begins.", "; ".join(changed), start.epoch)
        elif size != self._global_batch_size:
            _log.warning("Epoch %d continues with global batches of %d.", start.epoch, self._global_batch_size)
        self._plan = self._plan_from(self._global_batch_size, start)
        return int(state["position"])

    def _start_of(self, state: Mapping[str, Any], *, is_changed: bool) -> Start:
        """Where the plan of a run begins that goes on at a state: at the next epoch where its data changed."""
        position, size = state["position"], state["global_batch_size"]
        saved = state["start"]
        start = Start(position=saved["position"], epoch=saved["epoch"], taken=tuple(saved["taken"]))
        if is_changed:
            return Start(position=position, epoch=start.epoch + 1)
        return start if size == self._global_batch_size else self._plan_from(size, start).start_at(position)

    def report(self) -> list[str]:
        """Lines on enlarged samples, the histogram of shapes, and those that fill slowly."""
        lines = []
        if enlarged := self._shapes_of_rows.enlarged:
            limit = "" if self._max_upscale is None else f", of {self._max_upscale:g} that are allowed"
            most = self._shapes_of_rows.enlarged_by
            lines.append(f"{enlarged} of {len(self._rows)} samples are enlarged, by up to {most:.2f}{limit}.")
        if len(self._layouts.sizes_K2) > 1:
            count_K = self._layouts.own.sizes
            lines.append(f"Samples by height x width: {self._shapes(count_K, np.argsort(-count_K, kind='stable'))}.")
            slow = np.flatnonzero((count_K > 0) & (count_K < self._global_batch_size))
            if len(slow) and self._leftover == "carry":
                text = f"Samples of these shapes wait for a global batch of {self._global_batch_size} over epochs"
                remedy = "List fewer data.aspect_ratios, or lower train.global_batch_size."
                lines.append(f"{text}: {self._shapes(count_K, slow)}. {remedy}")
        return lines

    def _shapes(self, count_K: np.ndarray, buckets: np.ndarray) -> str:
        sizes = self._layouts.sizes_K2
        return ", ".join(f"{sizes[b][0]}x{sizes[b][1]} {count_K[b]}" for b in buckets if count_K[b])

    def _changes(self, state: Mapping[str, Any]) -> list[str]:
        changed, content = self._changed_order(state), changed_content(self._index, state)
        return (
            [text.replace(_REMEDIES["index"], content[0]) for text in changed]
            if changed and content
            else changed or content
        )

    def _changed_order(self, state: Mapping[str, Any]) -> list[str]:
        saved = read_identity(state)
        pairs = {name: (saved.get(name, "none"), self._identity.get(name, "none")) for name in _REMEDIES}
        return [f"{name} was {was}, is {now}: {_REMEDIES[name]}" for name, (was, now) in pairs.items() if was != now]

    def _plan_from(self, global_batch_size: int, start: Start) -> Plan:
        return Plan(layouts=self._layouts, global_batch_size=global_batch_size, leftover=self._leftover, start=start)
