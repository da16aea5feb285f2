"""The trackers of accelerate, by its own classes and a stand-in for each library."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from accelerate.state import PartialState
from PIL import Image

from cascade_train.config.preflight import EXTRAS
from cascade_train.config.schema_outputs import TrackerName
from cascade_train.engine.trackers import LIBRARIES, TRACKERS, read_image
from cascade_train.engine.tracking import Tracker, build_tracker

CONFIG = {"optimizer": {"lr": 0.1}, "run": {"dir": "/r", "api_key": "hunter2"}}

SHOWN = {
    "aim": ["Run().track(0.5, name='loss', step=3)", "Run().__setitem__('hparams'"],
    "clearml": ["report_scalar(title='loss', series='train', value=0.5, iteration=3)", "connect_configuration("],
    "comet": ["log_metric('loss', 0.5, step=3)", "log_parameters("],
    "dvclive": ["log_metric('loss', 0.5)", "log_params("],
    "mlflow": ["log_metrics({'loss': 0.5}, step=3, run_id='the-id')", "log_params("],
    "swanlab": ["log({'loss': 0.5}, step=3)", "config.update("],
    "trackio": ["log({'loss': 0.5}, step=3)", "config.update("],
}
"""What a library is told of a step, and of the configuration."""


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    name: str = request.getfixturevalue("name")
    module = MagicMock(name=LIBRARIES[name], __version__="9.0", __path__=[])
    for started in (module.Run, module.Task.init, module.start, module.init, module.start_run):
        ids = dict.fromkeys(("hash", "id", "name", "get_key.return_value", "info.run_id"), "the-id")
        started.return_value.configure_mock(**ids)
    module.Task.current_task.return_value = None
    module.utils.validation.configure_mock(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100)
    monkeypatch.setitem(sys.modules, LIBRARIES[name], module)
    monkeypatch.setitem(sys.modules, f"{LIBRARIES[name]}.plots", module.plots)
    return module


def start(name: str, folder: Path, run_id: str | None = None, mode: str = "offline") -> Tracker:
    place = {"project": "tests", "entity": None, "mode": mode, "run_name": "lora-c_tiny", "run_id": run_id}
    return build_tracker(name, directory=folder, config=CONFIG, **place)  # type: ignore[arg-type]


def test_every_tracker_is_a_choice_that_accelerate_or_this_library_knows() -> None:
    assert {"none", *TRACKERS} == set(TrackerName)
    assert {name: EXTRAS["tracker.name"][name] for name in LIBRARIES} == LIBRARIES
    assert LIBRARIES.keys() == SHOWN.keys()


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_told_what_a_run_measures_and_no_secret(
    world: Any, tmp_path: Path, name: str, library: MagicMock
) -> None:
    tracker = start(name, tmp_path)
    assert tracker.run_id == (None if name == "dvclive" else "the-id")
    Image.new("RGB", (6, 4), "red").save(tmp_path / "grid.png")
    tracker.log({"step": 3, "loss": 0.5, "lr": None}, 3)
    tracker.log_image("grid", tmp_path / "grid.png", 3)
    tracker.alert("Failed", "it broke")
    tracker.finish()
    assert not tracker.failed
    told = str(library.mock_calls)
    assert [text for text in SHOWN[name] if text not in told] == [], told
    assert ("grid" in told) == (name in ("aim", "clearml", "swanlab"))
    assert "hunter2" not in told
    assert "<redacted>" in told
    for _, _, options in library.mock_calls:
        recorded = {key for key, value in options.items() if value is True}
        assert recorded <= {"resume", "allow_val_change"}, "a library records nothing by itself"
    assert PartialState._shared_state == {}, "accelerate leaves the process group alone"


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_run_that_continues_is_the_same_tracked_run(
    world: Any, tmp_path: Path, name: str, library: MagicMock
) -> None:
    start(name, tmp_path, run_id="abc", mode="online")
    told = str(library.mock_calls)
    assert ("'abc'" in told) == (name != "dvclive")
    assert str(tmp_path) not in told or name in ("comet", "dvclive", "swanlab"), "online, it is where its settings say"


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_an_image_of_any_mode_is_read_as_rgb(tmp_path: Path, mode: str) -> None:
    Image.linear_gradient("L").resize((6, 4)).convert(mode).save(tmp_path / "a.png")
    pixels = read_image(tmp_path / "a.png")
    assert (pixels.shape, str(pixels.dtype)) == ((4, 6, 3), "uint8")
    assert abs(pixels[:, 0, 1].astype(int) - [31, 95, 159, 223]).max() <= 30
