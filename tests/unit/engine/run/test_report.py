"""The page of a run: its numbers are the run's, it needs nothing else, and names stay text."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path

import pytest

from cascade_train.engine.checkpoint.folder import Manifest, write_manifest
from cascade_train.engine.run import report
from cascade_train.engine.run.report import page, read_metrics, run_data, samples, series, state, write_report
from tests.unit.engine.run.report_page import HOSTILE, SECRET, Page, make_run, metrics, write_lines, write_picture


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "x")


@pytest.fixture(scope="module")
def shown(run: Path) -> Page:
    base = {"run": {"name": HOSTILE, "dir": str(run)}, "optimizer": {"lr": 0.5}, "data": {}}
    return Page(page(run_data(run, bases={"experiment=some": base})))


def test_every_number_of_the_page_is_that_of_the_metrics(shown: Page) -> None:
    curves = shown.data["runs"][0]["series"]
    rows = metrics(9)
    assert curves.keys() == {key for row in rows for key in row} - {"step", "samples_seen"}
    for name, curve in curves.items():
        logged = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        assert list(zip(curve["x"], curve["y"], strict=True)) == logged, name
    assert curves["images_per_second"]["x"][0] == 3
    assert "0.0909091" in shown.text  # the last loss, 1/11


def test_a_long_curve_is_of_means_and_extremes(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "loss": math.sin(step)} for step in range(1, 11)])
    curve = series(read_metrics(tmp_path, most=4))["loss"]
    parts = [[math.sin(step) for step in steps] for steps in ((1, 2), (3, 4), (5, 6), (7, 8), (9, 10))]
    assert curve["x"] == [2, 4, 6, 8, 10]
    assert curve["y"] == pytest.approx([sum(part) / len(part) for part in parts])
    assert curve["low"] == [min(part) for part in parts]
    assert curve["high"] == [max(part) for part in parts]


def test_the_page_needs_nothing_but_itself(shown: Page) -> None:
    assert shown.refers == []
    assert shown.policy.startswith("default-src 'none'; img-src data:")
    for text in (shown.style, shown.scripts[1]):
        assert len(text) > 1000
        assert not re.search(r"https?:|//[a-z]|url\(|@import|fetch|XMLHttp|import\(", text)
    urls = [url for row in shown.data["samples"]["rows"] for urls in row["pictures"].values() for url in urls if url]
    assert len(urls) == 7
    assert all(url.startswith("data:image/jpeg;base64,") for url in urls)


def test_hostile_names_stay_text(shown: Page) -> None:
    assert len(shown.scripts) == 2
    assert "img" not in shown.tags
    assert shown.text.count(HOSTILE) >= 5, "title, fact, data, environment, configuration"
    assert shown.data["title"] == f"Run {HOSTILE}"
    assert shown.data["samples"]["rows"][1]["caption"] == f"{HOSTILE} 1"


def test_secrets_are_hidden(run: Path, shown: Page) -> None:
    text = "".join([shown.text, *shown.scripts])
    assert SECRET in (run / "config.yaml").read_text()
    assert SECRET not in text
    assert "https://<redacted>@host" in shown.text


def test_what_happened_is_told(shown: Page) -> None:
    notes = [(note["text"], note["warning"]) for note in shown.data["notes"]]
    assert notes[0] == ("Continued at step 2, 2026-01-02, with log.every_steps: 10 → 1.", False)
    assert notes[1] == ("1 samples could not be read.", True)
    assert notes[2] == ("The loop waited for data in 30% of its time. Raise data.num_workers.", True)
    assert notes[3] == ("validate/loss was lowest at step 3, 0.833333; it is 1.5 now.", True)
    assert len(notes) == 4
    assert "Stopped by SIGTERM at step 9; saved." in shown.text


def test_differences_begin_with_what_the_command_line_sets(shown: Page) -> None:
    (difference,) = shown.data["differences"]
    assert difference["base"] == "experiment=some"
    assert difference["rows"][0] == ["optimizer.lr", 0.5, 1e-4, True]
    assert [row[0] for row in difference["rows"][1:]] == ["data", "data.urls"]
    assert not any(row[3] for row in difference["rows"][1:])


def test_other_runs_are_drawn_and_compared(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", steps=4)
    data = run_data(run, bases={}, against=[other])
    assert [each["name"] for each in data["runs"]] == [HOSTILE, str(other)]
    assert data["runs"][1]["series"]["loss"]["x"] == [1, 2, 3, 4]
    assert [each["base"] for each in data["differences"]] == [str(other)]
    assert [row[0] for row in data["differences"][0]["rows"]] == ["run.dir"]


def test_samples_lie_in_the_order_of_their_steps(shown: Page) -> None:
    found = shown.data["samples"]
    assert found["labels"] == ["step 0", "step 3", "step 9"]
    assert [list(row["pictures"]) for row in found["rows"]] == [["original", "sample"], ["sample"]]
    assert [url is not None for url in found["rows"][0]["pictures"]["original"]] == [True, False, False]
    assert len(set(found["rows"][0]["pictures"]["sample"])) == 3
    assert [(each["label"], each["y"]) for each in shown.data["noise_levels"]] == [
        ("step 0", [1.0, 0.25]),
        ("step 3", [1.0, 3.25]),
        ("step 9", [1.0, 9.25]),
    ]


def test_pictures_are_few_whatever_the_run_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_PICTURES", 10)
    for step in range(20):
        for row in range(10):
            write_picture(tmp_path / f"step_{step}" / f"{row:02d}_sample.png")
    (tmp_path / "step_19" / "03_sample.png").write_bytes(b"no picture")
    found = samples({str(step): tmp_path / f"step_{step}" for step in range(20)})
    assert found["labels"] == ["0", "19"]
    assert len(found["rows"]) == report.MOST_ROWS
    assert found["rows"][3]["pictures"]["sample"][1] is None


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "start.json", "environment.json", "samples", "none"])
def test_a_run_that_lacks_a_file_has_a_page(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", grids=(1,))
    (run / name).rename(tmp_path / name) if name != "none" else write_lines(run / "metrics.jsonl", [])
    assert Page(page(run_data(run, bases={}))).data["title"] == f"Run {HOSTILE if name != 'config.yaml' else 'run'}"


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", grids=(1,))
    for name in ("config.yaml", "start.json", "environment.json", "stopped.json"):
        (run / name).write_text("{ [")
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 10, "loss": NaN}\n{"step": 11, "lo')
    (run / "samples/step_1/loss_by_logsnr.png").write_bytes(b"")
    data = Page(page(run_data(run, bases={}))).data
    assert data["runs"][0]["series"]["loss"]["x"] == list(range(1, 10))
    assert data["noise_levels"] == []
    assert data["state"]["kind"] == "unfinished"


def test_numbers_of_evaluations_are_drawn_but_not_those_of_replaced_weights(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", grids=(1,))
    (run / "checkpoints" / "step_4").mkdir(parents=True)
    manifest = Manifest(step=4, files={}, facts={})
    write_manifest(run / "checkpoints" / "step_4", manifest)
    judged = [(4, "before", 9.0), (8, "gone", 3.0), (4, manifest.stamp, 5.0), (2, "gone", 7.0), (2, "gone", 6.0)]
    judged.append((4, "before", 1))
    rows = [{"step": step, "weights": weights, "evaluate/fid": fid, "images": 4} for step, weights, fid in judged]
    write_lines(run / "evaluation.jsonl", rows)
    shown = Page(page(run_data(run, bases={}))).data["runs"][0]["series"]
    assert (shown["evaluate/fid"]["x"], shown["evaluate/fid"]["y"]) == ([2, 4, 8], [6.0, 5.0, 3.0])
    assert "images" not in shown


def test_a_run_is_finished_once_its_last_step_is_exported(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", metrics(4))
    rows = read_metrics(tmp_path)
    assert state(tmp_path, rows)["kind"] == "unfinished"
    (tmp_path / "export").mkdir()
    (tmp_path / "export/exported.json").write_text(json.dumps({"step": 3}))
    assert state(tmp_path, rows)["kind"] == "unfinished"
    (tmp_path / "export/exported.json").write_text(json.dumps({"step": 4}))
    assert state(tmp_path, rows) == {"kind": "finished", "text": "Finished at step 4."}


def test_a_page_that_cannot_be_written_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(tmp_path / "run", grids=(1,))

    def fails() -> dict[str, dict[str, object]]:
        raise KeyError(f"api_key={SECRET}")

    write_report(run, fails)
    assert "report.html could not be written (KeyError: " in caplog.text
    assert SECRET not in caplog.text
    assert not (run / "report.html").exists()
    caplog.clear()
    write_report(run, lambda: {})
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (run / "report.html").is_file()


def test_a_run_without_a_step_gets_no_page(tmp_path: Path) -> None:
    write_report(tmp_path, lambda: {})
    assert not any(tmp_path.iterdir())
