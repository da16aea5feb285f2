"""The curve that every run leaves: what is drawn, and that a bad file stops nothing."""

import json
import logging
from pathlib import Path

import pytest
from PIL import Image

from cascade_train.engine import loss_curve
from cascade_train.engine.chart import Line, draw_chart
from cascade_train.engine.loss_curve import POINTS, LossCurve, running_mean


def rows(count: int, **last: float | None) -> list[dict]:
    made = [{"step": step, "loss": 1.0 / step} for step in range(1, count + 1)]
    made[-1] |= last
    return made


def draw(directory: Path, metrics: list[dict]) -> Path:
    """Write metrics, draw them, and return the picture."""
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    LossCurve(directory / "metrics.jsonl", is_main=True).draw()
    return directory / "loss.png"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Line]:
    seen: dict[str, Line] = {}

    def draw(title, drawn, **options):
        seen.update({line.label: line for line in drawn} | {"": options})
        return draw_chart(title, drawn, **options)

    monkeypatch.setattr(loss_curve, "draw_chart", draw)
    return seen


def test_losses_of_training_and_validation_are_drawn(lines: dict[str, Line], tmp_path: Path):
    draw(tmp_path, [*rows(4), {"step": 5, "loss": None}, {"step": 6, "loss": 0.5, "validate/loss": 0.25}])
    assert [step for step, _ in lines["each step"].points] == [1, 2, 3, 4, 6, 6]
    assert lines["validate/loss (unweighted, at fixed noise levels)"].points == [(6, 0.25)]
    assert not [label for label in lines if label.startswith("validate_ema")]
    assert lines[""]["logarithmic"]


def test_a_loss_that_is_not_positive_gets_a_linear_scale(lines: dict[str, Line], tmp_path: Path):
    assert draw(tmp_path, rows(3, loss=-1.0)).exists()
    assert not lines[""]["logarithmic"]


def test_the_mean_follows_the_losses():
    assert running_mean([(1, 1.0), (2, 2.0)]) == [(1, 1.0), (2, pytest.approx(1.05))]


def test_a_long_run_is_thinned_and_keeps_its_ends(lines: dict[str, Line], tmp_path: Path):
    draw(tmp_path, rows(3 * POINTS + 5))
    points = lines["each step"].points
    assert len(points) <= POINTS + 1
    assert (points[0][0], points[-1][0]) == (1, 3 * POINTS + 5)


def test_the_picture_lies_beside_the_metrics(tmp_path: Path):
    curve = LossCurve(tmp_path / "metrics.jsonl", is_main=True)
    curve.draw()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(9)))
    LossCurve(tmp_path / "metrics.jsonl", is_main=False).draw()
    assert not (tmp_path / "loss.png").exists()
    curve.draw()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]
    with Image.open(tmp_path / "loss.png") as picture:
        assert (32, 64, 160) in {colour for _, colour in picture.convert("RGB").getcolors(100_000)}


def test_a_damaged_line_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    LossCurve(tmp_path / "metrics.jsonl", is_main=True).draw()
    assert "loss.png could not be drawn" in caplog.text
    assert not (tmp_path / "loss.png").exists()


def test_a_drawing_reads_the_lines_since_the_last_one_and_all_of_them_after_a_cut(
    lines: dict[str, Line], tmp_path: Path
):
    metrics, first = tmp_path / "metrics.jsonl", rows(3)
    curve = LossCurve(metrics, is_main=True)
    metrics.write_text("".join(json.dumps(row) + "\n" for row in first))
    curve.draw()
    metrics.write_text("#" * metrics.stat().st_size + json.dumps({"step": 4, "loss": 0.1}) + "\n")
    curve.draw()
    assert [step for step, _ in lines["each step"].points] == [1, 2, 3, 4, 4], "what was read is not read again"
    metrics.write_text(json.dumps(first[0]) + "\n")
    curve.forget()
    curve.draw()
    assert [step for step, _ in lines["each step"].points] == [1, 1]
