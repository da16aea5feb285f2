"""A control network from a command line: runs that train, continue, show and leave something, and painting under it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade_train.commands import generate as generate_verb
from cascade_train.commands.evaluate import EvaluateArgs, evaluate
from cascade_train.engine.sampling import CELL_PX, LABEL_PX
from cascade_train.errors import ConfigError
from cascade_train.results.find import stored_network
from cascade_train.tasks.controlnet import ControlNet
from tests.integration.runs import read_metrics, train

pytestmark = pytest.mark.slow

CONTROL = ("task=controlnet", "task.bottleneck=small", "filter@task.filter=canny", "optimizer.lr=3e-3")
LOOKING = (
    *("sample.every_steps=4", "sample.count=2", "sample.steps=2"),
    *("validate.every_steps=4", "validate.share=0.1", "validate.samples=8", "validate.logsnr=[0]"),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prior whose last layer is not zero any more, so that gradients reach the control."""
    return train(tmp_path_factory.mktemp("base") / "run", "task=finetune", "optimizer.lr=3e-3", "train.max_steps=3")


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with an average, a validation and a grid."""
    folder = tmp_path_factory.mktemp("control") / "run"
    return train(folder, *CONTROL, *LOOKING, f"model.weights={base}", "ema.decay=0.5")


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "export" / "controlnet" / "controlnet.safetensors")


def paint(source: Path, out: Path, **given: object) -> np.ndarray:
    """Return what the verb paints of one prompt."""
    arguments = {"prompts": ["a red circle"], "steps": 2, **given}
    assert generate_verb.generate(generate_verb.GenerateArgs(source=str(source), out=str(out), **arguments)) == 0
    return np.asarray(Image.open(out / "00_00.png")).astype(int)


def test_an_evaluation_draws_maps_by_the_number_of_a_picture(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        Image.new("RGB", (96, 96), (50 * number, 0, 0)).save(tmp_path / f"{number}.png")
    numbers, maps = [], ControlNet._maps
    monkeypatch.setattr(ControlNet, "_maps", lambda *given: numbers.append(tuple(given[2])) or maps(*given))
    options = {"real": str(tmp_path), "steps": 1, "batch_size": 2, "out": str(tmp_path / "out"), "track": False}
    assert evaluate(EvaluateArgs(source=str(run), **options)) == 0
    assert numbers == [(0, 1), (2, 3), (4,)]


def test_the_control_trains_and_is_left_behind(run: Path) -> None:
    rows = read_metrics(run)
    assert [row["step"] for row in rows if "grad_norm" in row] == [1, 2, 3, 4]
    assert all(row["grad_norm"] > 0 for row in rows if "grad_norm" in row)
    tensors = stored(run)
    assert len([name for name in tensors if name.startswith("projections.")]) == 8
    assert all(tensors[f"projections.{i}.2.weight"].any() for i in range(4))
    kept = [path.name for path in (run / "export").iterdir() if path.is_dir()]
    assert kept == ["controlnet"]
    with pytest.raises(
        ConfigError, match=r"a run of what trains beside the network \(ControlNet\), whose export/ holds"
    ):
        stored_network(str(run), model=None, key="from", allow_any_target=False)


def test_the_grid_shows_the_control_beside_the_rest(run: Path) -> None:
    grid = Image.open(run / "samples" / "step_4" / "grid.png")
    titles = ("original", "control", "one-step prediction", "sample", "ema_sample")
    assert grid.width == LABEL_PX + CELL_PX * len(titles)
    pixels = np.asarray(grid).astype(int)
    cell = pixels[30 : 24 + CELL_PX - 8, LABEL_PX + CELL_PX + 4 : LABEL_PX + 2 * CELL_PX - 12]
    assert np.abs(cell - cell[..., :1]).max() == 0, "edges are grey"
    assert (cell.min(), cell.max() > 150) == (0, True)


def test_pictures_and_maps_steer_what_is_painted(run: Path, tmp_path: Path) -> None:
    picture, edges = Image.new("RGB", (120, 96), "white"), Image.new("L", (96, 96))
    picture.paste("black", (40, 20, 90, 60))
    edges.paste(255, (30, 20, 80, 24))
    for name, image in {"picture": picture, "edges": edges, "grey": edges.convert("RGB")}.items():
        image.save(tmp_path / f"{name}.png")
    filtered = paint(run, tmp_path / "a", image=str(tmp_path / "picture.png"))
    given = paint(run, tmp_path / "b", control=str(tmp_path / "edges.png"))
    grey = paint(run, tmp_path / "c", control=str(tmp_path / "grey.png"))
    none = paint(run, tmp_path / "d", control=str(tmp_path / "edges.png"), strength=0.0)
    same = paint(run, tmp_path / "e", image=str(tmp_path / "picture.png"), strength=0.0)
    assert np.abs(given - grey).max() == 0
    assert np.abs(none - same).max() == 0
    assert np.abs(filtered - given).max() > 0
    assert np.abs(given - none).max() > 0


def test_prompts_of_ones_own_follow_pictures_of_the_data(base: Path, tmp_path: Path) -> None:
    own = ("sample.every_steps=1", "sample.steps=1", "sample.prompts=[a blue star,a ring,a cross]")
    train(tmp_path / "run", *CONTROL, f"model.weights={base}", "train.max_steps=1", "data.samples=2", *own,
          "train.global_batch_size=2")  # fmt: skip
    assert len(list((tmp_path / "run" / "samples" / "step_1").glob("*_sample.png"))) == 3


def test_a_run_from_a_bare_file_writes_what_that_does_not_say(run: Path, base: Path, tmp_path: Path) -> None:
    save_file(stored(run), tmp_path / "bare.safetensors")
    given = (*CONTROL, f"model.weights={base}", f"task.weights={tmp_path / 'bare.safetensors'}")
    train(tmp_path / "told", *given, "task.blocks=[0,1,6,7]", "train.max_steps=1")
    assert stored(tmp_path / "told").keys() == stored(run).keys()
    with safe_open(tmp_path / "told" / "export" / "controlnet" / "controlnet.safetensors", framework="pt") as file:
        header = file.metadata()
    assert (header["blocks"], header["channels"], "CannyFilter" in header["filter"]) == ("[0, 1, 6, 7]", "1", True)
