"""The curve that every run leaves and the loss by noise level: what is drawn, and that a bad file stops nothing."""

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.axes import Axes
from PIL import Image

from cascade_train.engine import loss_charts
from cascade_train.engine.loss_charts import LEVELS, POINTS, LossCurve, LossPlot


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
def charts(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """What is drawn, picture by picture."""
    seen, draw = [], loss_charts.draw_chart

    def draw_and_keep(*given):
        chart = draw(*given)
        seen.append(chart.axes[0])
        return chart

    monkeypatch.setattr(loss_charts, "draw_chart", draw_and_keep)
    return seen


def points(axes: Axes, label: str = "each step") -> list[tuple[float, float]]:
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return [(float(x), float(y)) for x, y in line.get_xydata()]


def ticks(axes: Axes) -> list[str]:
    """The numbers beside the y axis, of those that lie in view."""
    low, high = axes.get_ylim()
    axes.figure.draw_without_rendering()
    marks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    return [each.label1.get_text() for each in marks if low <= each.get_loc() <= high]


def test_losses_of_training_and_validation_are_drawn(charts: list[Axes], tmp_path: Path):
    draw(tmp_path, [*rows(4), {"step": 5, "loss": None}, {"step": 6, "loss": 0.5, "validate/loss": 0.25}])
    assert [step for step, _ in points(charts[0])] == [1, 2, 3, 4, 6, 6]
    assert points(charts[0], "running mean")[1] == (2, pytest.approx(0.95 * 1.0 + 0.05 * 0.5))
    assert set(points(charts[0], "validate/loss (weighted as the loss, on held-out samples)")) == {(6, 0.25)}
    assert len(charts[0].lines) == 3
    assert charts[0].get_yscale() == "log"


def test_a_loss_that_is_not_positive_gets_a_linear_scale(charts: list[Axes], tmp_path: Path):
    assert draw(tmp_path, rows(3, loss=-1.0)).exists()
    assert charts[0].get_yscale() == "linear"


@pytest.mark.parametrize(
    ("last", "expected"),
    [(0.376 / 0.838, {"0.4", "0.5", "0.6", "0.7", "0.8"}), (0.002, {"0.002", "0.005", "0.01", "0.1", "0.5"})],
    ids=["less than a power of ten", "powers of ten"],
)
def test_ticks_are_round_numbers(charts: list[Axes], tmp_path: Path, last: float, expected: set[str]):
    draw(tmp_path, [{"step": 1, "loss": 0.838}, {"step": 2, "loss": 0.838 * last}])
    assert expected <= set(ticks(charts[0]))
    assert all(len(each.lstrip("0.")) == 1 for each in ticks(charts[0])), "one digit that counts"
    assert (charts[0].get_xlabel(), charts[0].get_ylabel()) == ("optimizer step", "loss")


def test_nothing_of_the_host_is_changed(tmp_path: Path):
    code = (
        "import sys, pathlib, cascade_train.engine.loss_charts as charts; assert 'matplotlib' not in sys.modules\n"
        "import matplotlib; before = list(dict.items(matplotlib.rcParams))\n"
        "charts.LossCurve(pathlib.Path('metrics.jsonl'), is_main=True).draw()\n"
        "assert list(dict.items(matplotlib.rcParams)) == before and 'matplotlib.pyplot' not in sys.modules"
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "loss.png").exists()


def test_a_long_run_is_thinned_and_keeps_its_ends(charts: list[Axes], tmp_path: Path):
    draw(tmp_path, rows(3 * POINTS + 5))
    drawn = points(charts[0])
    assert len(drawn) <= POINTS + 1
    assert (drawn[0][0], drawn[-1][0]) == (1, 3 * POINTS + 5)


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


DAMAGED = ['{"step": 1, "lo', "[1]", '{"loss": 1.0}', '{"step": 2, "loss": []}', '{"step": [], "loss": 1.0}']


@pytest.mark.parametrize("line", [*DAMAGED, '{"step": 1e99, "loss": 1}'])
def test_a_damaged_line_stops_nothing(line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 1.0}}\n{line}\n')
    LossCurve(tmp_path / "metrics.jsonl", is_main=True).draw()
    assert "loss.png could not be drawn" in caplog.text
    assert not (tmp_path / "loss.png").exists()


def test_a_drawing_reads_the_lines_since_the_last_one(charts: list[Axes], tmp_path: Path):
    metrics, first = tmp_path / "metrics.jsonl", rows(3)
    curve = LossCurve(metrics, is_main=True)
    metrics.write_text("".join(json.dumps(row) + "\n" for row in first))
    curve.draw()
    metrics.write_text("#" * metrics.stat().st_size + json.dumps({"step": 4, "loss": 0.1}) + "\n")
    curve.draw()
    assert [step for step, _ in points(charts[-1])] == [1, 2, 3, 4, 4], "what was read is not read again"


CPU = torch.device("cpu")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """What is drawn: (points, points before them) per picture."""
    seen = []
    draw = loss_charts.draw_losses
    monkeypatch.setattr(loss_charts, "draw_losses", lambda *given: seen.append(given) or draw(*given))
    return seen


def test_losses_are_averaged_by_level_since_the_last_plot(tmp_path: Path, drawn: list):
    plot = LossPlot(directory=tmp_path, device=CPU, is_main=True)
    plot.add(torch.tensor([-3.1, -3.2, 5.2]), torch.tensor([1.0, 2.0, 0.5]))
    plot.add(torch.tensor([-3.3]), torch.tensor([6.0]))
    plot.draw(1)
    plot.add(torch.tensor([-99.0, 99.0]), torch.tensor([4.0, 8.0]))
    plot.draw(2)
    first = [(-3.25, 3.0), (5.25, 0.5)]
    assert drawn == [(first, []), ([(-15.75, 4.0), (15.75, 8.0)], first)]


def test_the_picture_lies_beside_the_samples_of_its_step(tmp_path: Path):
    plot = LossPlot(directory=tmp_path, device=CPU, is_main=True)
    plot.add(torch.linspace(-9, 9, 50), torch.linspace(0, 1, 50))
    (path,) = plot.draw(7)
    assert path == tmp_path / "step_7" / "loss_by_logsnr.png"
    colours = {colour for _, colour in Image.open(path).convert("RGB").getcolors(100_000)}
    assert (0x20, 0x40, 0xA0) in colours
    with Image.open(path) as picture:
        points = json.loads(picture.info["points"])
    assert len(points["x"]) == len(points["y"]) == len(set(points["x"])) > 30
    assert points["y"] == sorted(points["y"])


def test_nothing_measured_and_other_ranks_draw_nothing(tmp_path: Path):
    plot = LossPlot(directory=tmp_path, device=CPU, is_main=True)
    assert plot.draw(1) == []
    other = LossPlot(directory=tmp_path, device=CPU, is_main=False)
    other.add(torch.zeros(3), torch.ones(3))
    assert other.draw(1) == []
    assert not any(tmp_path.iterdir())
    plot.add(torch.zeros(2), torch.zeros(2))
    assert len(plot.draw(1)) == 1, "a single level, without a loss"


def test_gathering_never_waits_for_the_device_and_never_grows(tmp_path: Path):
    """On the meta device any read of a value raises, as it would stall a GPU."""
    plot = LossPlot(directory=tmp_path, device=torch.device("meta"), is_main=True)
    for size in (1, 1000):
        plot.add(torch.zeros(size, device="meta"), torch.zeros(size, device="meta"))
    assert plot._sums_2N.shape == (2, LEVELS)


def test_a_plot_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    def full(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    plot = LossPlot(directory=tmp_path, device=CPU, is_main=True)
    plot.add(torch.linspace(-9, 9, 50), torch.linspace(0, 1, 50))
    assert plot.draw(7) == []
    assert "No space left on device" in caplog.text
    assert "GiB are free there). The run goes on without this plot." in caplog.text


def test_no_backend_of_a_notebook_and_no_matplotlib_are_needed(tmp_path: Path):
    """Draws where MPLBACKEND names a package that is missing; ends nothing where matplotlib cannot be loaded."""
    program = """
import sys, torch
from pathlib import Path
from cascade_train.engine.loss_charts import LossPlot
plot = LossPlot(directory=Path(sys.argv[1]), device=torch.device("cpu"), is_main=True)
plot.add(torch.zeros(2), torch.ones(2))
print(len(plot.draw(1)))
for name in [name for name in sys.modules if name.startswith("matplotlib")]:
    del sys.modules[name]
sys.modules["matplotlib"] = None
plot.add(torch.zeros(2), torch.ones(2))
print(len(plot.draw(2)))
"""
    environment = {**os.environ, "MPLBACKEND": "module://missing.backend"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]
