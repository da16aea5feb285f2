"""Checkpoints are ranked by what an evaluation found of them later."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from cascade_train.engine.checkpoint.folder import (
    CheckpointFolder,
    Manifest,
    Retention,
    best_value,
    hash_file,
    read_manifest,
    write_manifest,
)


def test_the_best_by_an_evaluation_stay(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (1, 2, 3, 4):
        folder.path(step).mkdir(parents=True)
        write_manifest(folder.path(step), Manifest(step=step, files={}, facts={}))
    rule = Retention(keep_last=1, keep_best=1, best_metric="evaluate/fid")
    assert [s for s, reasons in rule.reasons(folder.complete()).items() if reasons] == [4], "none is judged yet"
    rows = [{"step": step, "evaluate/fid": fid} for step, fid in ((1, 9.0), (2, 5.0), (3, 7.0), (3, None), (1, 6.0))]
    damaged = ["null", "[4]", '{"evaluate/fid": 1.0}', '{"step": 4, "evaluate/fid": "1"}', '{"step": 4, "evalua']
    text = "\n".join([*map(json.dumps, rows), *damaged])
    (tmp_path / "evaluation.jsonl").write_text(text)
    found = folder.complete()
    assert [best_value(found[step], "evaluate/fid") for step in found] == [6.0, 5.0, 7.0, None]
    reasons = rule.reasons(found)
    assert reasons == {1: [], 2: ["number 1 by evaluate/fid"], 3: [], 4: ["newest 1"]}
    assert read_manifest(folder.path(2)).facts == {}, "the file is as it was saved"


def test_numbers_of_weights_that_a_later_save_replaced_do_not_count(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.path(1).mkdir(parents=True)

    def save(content: str) -> str:
        (folder.path(1) / "a").write_text(content)
        manifest = Manifest(step=1, files={"a": hash_file(folder.path(1) / "a")}, facts={})
        write_manifest(folder.path(1), manifest)
        return manifest.stamp

    def value() -> float | None:
        return best_value(folder.complete()[1], "evaluate/fid")

    before = save("first")
    (tmp_path / "evaluation.jsonl").write_text(json.dumps({"step": 1, "evaluate/fid": 3.0, "weights": before}))
    assert value() == 3.0
    assert save("second") != before
    assert value() is None
    save("first")
    assert value() == 3.0
    write_manifest(folder.path(1), replace(read_manifest(folder.path(1)), name="good"))
    assert value() == 3.0, "a name changes no weights"
