"""Long runs and large data: memory that does not grow with a file, and work that is not done for each row or step."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cascade_train.batch import Unreadable
from cascade_train.commands.compare import differing_step
from cascade_train.commands.parts.python import Run
from cascade_train.config.sweeps.runs import measured
from cascade_train.data.data_set import Rows, open_data_set
from cascade_train.data.index.row_filter import RowFilters, parse_row_filters
from cascade_train.data.index.rows import Index
from cascade_train.data.parquet import PARQUET_FIELDS
from cascade_train.data.survey import survey
from cascade_train.data.tar.files import check_urls
from cascade_train.engine.checkpoint import folder as manifests
from cascade_train.engine.checkpoint.folder import (
    CheckpointFolder,
    Manifest,
    Retention,
    hash_file,
    whole_manifest,
    write_manifest,
)
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.faults import bad_samples
from cascade_train.engine.loss_charts import POINTS, Curve, LossCurve
from cascade_train.engine.metrics import cut_lines
from cascade_train.engine.run.report import page, run_data
from cascade_train.errors import ConfigError
from tests.unit.data import tars
from tests.unit.data.test_parquet import parquet, write

STEPS = 20_000


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """The metrics of a long run, with more text in each line than numbers that anything keeps."""
    (tmp_path / "config.yaml").write_text("run: {}\n")
    rows = ({"step": step, "loss": 1.0, "validate/loss": 0.5, "note": "-" * 300} for step in range(1, STEPS + 1))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize(
    "read",
    [
        lambda path: cut_lines(path, STEPS),
        lambda path: cut_lines(path, STEPS - 1),
        lambda path: measured(path, None),
        lambda path: Run.of(path.parent),
        lambda path: LossCurve(path, is_main=True).draw(),
        lambda path: page(run_data(path.parent, bases={})),
        lambda path: differing_step(path.parent, path.parent),
    ],
    ids=["nothing to cut", "cut", "ranked", "from Python", "drawn", "report", "compare"],
)
def test_metrics_are_never_in_memory_as_a_whole(metrics: Path, read: Callable[[Path], object]) -> None:
    size = metrics.stat().st_size
    read(metrics)  # imports what it needs
    tracemalloc.start()
    try:
        read(metrics)
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()


def test_a_curve_keeps_numbers_alone_and_draws_few_of_them() -> None:
    tracemalloc.start()
    try:
        curve = Curve()
        for step in range(100 * POINTS):
            curve.add(step, 0.5)
        assert tracemalloc.get_traced_memory()[0] < 30 * 100 * POINTS, "a step, a value and a mean take 24 bytes"
    finally:
        tracemalloc.stop()
    assert len(curve.points(curve.means)) == POINTS + 1


def test_the_list_of_unreadable_samples_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = [], bad_samples.read_whole_lines
    monkeypatch.setattr(bad_samples, "read_whole_lines", lambda path: reads.append(path) or read(path))
    met: list[Unreadable] = []
    listed = bad_samples.UnreadableList(tmp_path, rank=0, met=met)
    for step in range(1, 6):
        met += [Unreadable(f"a:{step}", "x"), Unreadable("a:0", "x")]
        listed.write(step)
    assert len(reads) == 1
    lines = (tmp_path / "rank_0.jsonl").read_text().splitlines()
    assert [json.loads(line)["sample"] for line in lines] == ["a:1", "a:0", "a:2", "a:3", "a:4", "a:5"]


def test_where_all_checkpoints_stay_a_save_reads_none_of_them(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[CheckpointFolder] = []
    complete = CheckpointFolder.complete
    monkeypatch.setattr(CheckpointFolder, "complete", lambda self: looks.append(self) or complete(self))
    for keep_last, expected in ((None, 0), (5, 1)):
        store = CheckpointStore(tmp_path / str(keep_last), retention=Retention(keep_last=keep_last, keep_best=1))
        looks.clear()
        store.save(1, {"model": {}}, {"step": 1})
        assert len(looks) == expected


def test_sizes_of_a_checkpoints_files_are_compared_without_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    write_manifest(tmp_path, Manifest(step=1, files={"a.bin": hash_file(tmp_path / "a.bin")}, facts={}))
    monkeypatch.delattr(manifests, "ThreadPoolExecutor")
    found = whole_manifest(tmp_path)
    assert found is not None
    assert found.step == 1


class Compared(np.ndarray):
    """An array that counts the numbers that are compared."""

    count = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        Compared.count += self.size
        return getattr(ufunc, method)(*(np.asarray(each) for each in inputs), **options)


def test_rows_of_many_row_groups_are_judged_without_looking_for_those_of_each(tmp_path: Path) -> None:
    groups = 200
    path = write(tmp_path / "a.parquet", [{"image": "a.png", "text": "a", "score": n % 2} for n in range(groups)], 1)
    source = parquet(path, row_filters={"score": "lambda s: s > 0"})
    rows = [(group, 8, 8, 0, -1) for group in range(groups)]
    verdicts = source._verdicts(path, np.array(rows, dtype=PARQUET_FIELDS).view(Compared))
    filters: RowFilters = parse_row_filters({"score": "lambda s: s > 0"})
    assert verdicts.tolist() == [filters.judge({"score": n % 2}) for n in range(groups)]
    assert Compared.count < groups * groups / 2


def test_a_survey_names_only_the_samples_that_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, name = [], Index.name
    part = tars_of(tmp_path, samples=60)
    monkeypatch.setattr(Index, "name", lambda self, row: names.append(row) or name(self, row))
    found = survey(part, read=3, seed=0)
    assert (found.samples, found.pictures, len(found.names)) == (120, 60, 3)
    assert set(names) == {0, 30, 59}, "evenly spread, of two equal ones the first"


def tars_of(folder: Path, *, samples: int) -> Rows:
    """Return the samples of one tar that is given twice."""
    tar = tars.write(folder / "a.tar", tars.samples(range(samples)))
    return open_data_set(tars.webdataset([str(tar), str(tar)]), share=None, held_out=None).training


def test_a_missing_tar_of_many_has_a_message_that_can_be_read(tmp_path: Path) -> None:
    urls = [str(tmp_path / f"{number:06d}.tar") for number in range(10_000)]
    with pytest.raises(ConfigError, match="10000 of 10000 tar files not found") as caught:
        check_urls(urls)
    assert len(str(caught.value)) < 3000
