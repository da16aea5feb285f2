"""The loss by noise level: means per level, fixed size, and the picture."""

import errno
from pathlib import Path

import pytest
import torch
from PIL import Image

from cascade_train.engine import loss_plot
from cascade_train.engine.loss_plot import LEVELS, LossPlot

CPU = torch.device("cpu")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """What is drawn: (points, points before them) per picture."""
    seen = []
    draw = loss_plot.draw_losses
    monkeypatch.setattr(loss_plot, "draw_losses", lambda *given: seen.append(given) or draw(*given))
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
    colours = {colour for _, colour in Image.open(path).getcolors(100_000)}
    assert (0x20, 0x40, 0xA0) in colours


def test_nothing_measured_and_other_ranks_draw_nothing(tmp_path: Path):
    assert LossPlot(directory=tmp_path, device=CPU, is_main=True).draw(1) == []
    other = LossPlot(directory=tmp_path, device=CPU, is_main=False)
    other.add(torch.zeros(3), torch.ones(3))
    assert other.draw(1) == []
    assert not any(tmp_path.iterdir())


def test_one_noise_level_and_no_loss_can_be_drawn(tmp_path: Path):
    plot = LossPlot(directory=tmp_path, device=CPU, is_main=True)
    plot.add(torch.zeros(2), torch.zeros(2))
    assert len(plot.draw(1)) == 1


def test_gathering_never_waits_for_the_device_and_never_grows(tmp_path: Path):
    """On the meta device any read of a value raises, as it would stall a GPU."""
    plot = LossPlot(directory=tmp_path, device=torch.device("meta"), is_main=True)
    for size in (1, 1000):
        plot.add(torch.zeros(size, device="meta"), torch.zeros(size, device="meta"))
    assert plot._sums_2N.shape == (2, LEVELS)


def test_a_plot_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    plot = LossPlot(directory=tmp_path, device=CPU, is_main=True)
    plot.add(torch.linspace(-9, 9, 50), torch.linspace(0, 1, 50))
    assert plot.draw(7) == []
    assert "No space left on device" in caplog.text
    assert "GiB are free there). The run goes on without this plot." in caplog.text
