"""The command that writes pages: of a run, of runs beside it, and of a sweep, whose best run it exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cascade_train.__main__ import launch
from cascade_train.commands import export as exporting
from cascade_train.config.saved import recipe_of
from tests.unit.engine.run.report_page import HOSTILE, Page, make_run, write_lines


def result(run: Path, lr: str, rank: int, loss: float | None, code: int = 0) -> dict[str, Any]:
    return {
        "number": rank,
        "overrides": ["task=lora", f"optimizer.lr={lr}", f"task.rank={rank}", f"run.note={HOSTILE}"],
        "run_dir": str(run),
        "exit_code": code,
        "best_metric": None,
        "metrics": {"step": 9},
        "values": {} if loss is None else {"validate/loss": loss},
        "earlier": False,
    }


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of four runs; one has failed, and one is no longer where it was."""
    folder = tmp_path_factory.mktemp("multirun") / "rates"
    runs = [make_run(folder / f"lr={lr},rank={rank}", grids=(9,)) for lr, rank in (("1e-4", 2), ("1e-3", 4), ("x", 8))]
    moved = Path("/elsewhere") / runs[1].name
    results = [result(runs[0], "1e-4", 2, 0.7), result(moved, "1e-3", 4, 0.3), result(runs[2], "x", 8, 0.1, code=1)]
    write_lines(folder / "results.jsonl", [*results, result(folder / "none", "1e-5", 4, None)])
    return folder


def written(folder: Path, *arguments: str, out: Path | None = None) -> Page:
    assert launch(["report", str(folder), *arguments, *([] if out is None else [f"out={out}"])]) == 0
    return Page((folder / "report.html" if out is None else out).read_text())


def test_a_page_of_a_run_lies_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other", steps=3)
    page = written(run, f"against={other}")
    assert [each["name"] for each in page.data["runs"]] == [HOSTILE, str(other)]
    assert "Against the defaults" not in page.text, "a configuration that cannot be composed is compared with none"
    assert f"{run}/report.html shows {run}" in capsys.readouterr().out


def test_the_recipe_is_what_the_choices_alone_compose() -> None:
    saved = {"run": {"name": "mine", "dir": "/runs/mine"}}
    overrides = ["experiment=tiny_c", "train.max_steps=5", "filter@task.filter=nothing", "data=../../secret"]
    ((name, config),) = recipe_of(overrides, saved).items()
    assert name == "experiment=tiny_c"
    assert (config["train"]["max_steps"], config["run"]["name"]) == (6000, "mine")
    assert recipe_of(overrides, {}) == {}


def test_a_sweep_is_a_table_with_the_best_first(sweep: Path) -> None:
    page = written(sweep)
    table = page.data["sweep"]
    assert (table["metric"], table["mode"], table["keys"]) == ("validate/loss", "min", ["optimizer.lr", "task.rank"])
    assert [(row["values"], row["metric"], row["note"]) for row in table["rows"]] == [
        ([1e-3, 4.0], 0.3, ""),
        ([1e-4, 2.0], 0.7, ""),
        ([1e-5, 4.0], None, ""),
        (["x", 8.0], 0.1, "exit code 1"),
    ]
    assert page.data["state"]["text"] == "4 runs, 1 failed."
    assert page.data["samples"]["labels"] == ["lr=1e-3,rank=4", "lr=1e-4,rank=2", "lr=x,rank=8"]
    curves = {each["name"]: each["series"] for each in page.data["runs"]}
    assert curves["lr=1e-3,rank=4"]["loss"]["y"] == [1 / (step + 2) for step in range(1, 10)]
    assert curves["none"] == {}
    assert page.refers == []


def test_a_sweep_that_has_not_ended_is_shown_by_the_runs_that_have(sweep: Path, tmp_path: Path) -> None:
    ended = json.loads((sweep / "results.jsonl").read_text().splitlines()[0])
    (tmp_path / ".results").mkdir()
    ended |= {"call": "x", "run_dir": str(make_run(tmp_path / "a"))}
    (tmp_path / ".results/a.json").write_text(json.dumps(ended))
    (tmp_path / ".results/b.json").write_text("torn")
    assert len(written(tmp_path).data["sweep"]["rows"]) == 1


def test_the_best_run_is_exported(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[exporting.ExportArgs] = []
    monkeypatch.setattr(exporting, "export", asked.append)
    assert launch(["report", str(sweep), f"promote={tmp_path}", f"out={tmp_path / 'page.html'}"]) == 0
    assert [(each.source, each.out) for each in asked] == [(str(sweep / "lr=1e-3,rank=4"), str(tmp_path))]


def test_what_cannot_be_shown_or_promoted_is_refused(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sweep / "lr=1e-4,rank=2"
    failed = tmp_path / "failed"
    write_lines(failed / "results.jsonl", [result(failed / "gone", "1e-4", 2, 0.7, code=1)])

    def refusal(*arguments: str, code: int = 2) -> str:
        assert launch(["report", *arguments]) == code
        return capsys.readouterr().err

    assert "Name the folder of a run, or of a sweep a run of which has ended." in refusal(f"{tmp_path}/none")
    assert "neither config.yaml nor results.jsonl with a result in it" in refusal(str(tmp_path))
    assert "The command needs a run.\ncascade-train report RUN key=value …" in refusal()
    assert "is no run; it has no config.yaml" in refusal(str(run), f"against={tmp_path}")
    assert "is for the page of a run. That of a sweep" in refusal(str(sweep), f"against={run}")
    assert "is for a sweep, and" in refusal(str(run), "promote=best")
    assert "ended well with a value of validate/loss, so that none is the best" in refusal(str(failed), "promote=best")
    assert "could not be written" in refusal(str(run), "out=/proc/no/page.html", code=1)
    assert not (failed / "report.html").exists()
