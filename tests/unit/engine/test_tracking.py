"""Trackers: tensorboard for real, wandb by a stand-in module."""

import os
import signal
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from cascade_train.engine import tracking
from cascade_train.engine.tracking import build_tracker
from cascade_train.errors import ConfigError

CONFIG = {"optimizer": {"lr": 0.1}, "data": {"urls": ["a.tar"]}}


def build(name, directory, **changes):
    plain = {"project": "p", "entity": None, "mode": "offline", "run_name": "lora-c_tiny", "run_id": None}
    return build_tracker(name, directory=directory, config=CONFIG, **{**plain, **changes})


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "grid.png"
    Image.fromarray(np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)).save(path)
    return path


class StandIn(types.ModuleType):
    """What the library uses of wandb; `of` returns the arguments of each call."""

    def __init__(self):
        super().__init__("wandb")
        self.calls = []
        self.config = types.SimpleNamespace(update=self._called("config"))
        self.Image = lambda array: ("image", array.shape)

    def _called(self, kind):
        return lambda *given, **named: self.calls.append((kind, *given, *([named] if named else [])))

    def init(self, **arguments):
        self._called("init")(**arguments)
        calls = {kind: self._called(kind) for kind in ("log", "define_metric", "finish", "alert")}
        self.run = types.SimpleNamespace(id=arguments["id"] or "new-id", notes=None, **calls)
        return self.run

    def of(self, kind):
        return [call[1:] for call in self.calls if call[0] == kind]


@pytest.fixture
def wandb(monkeypatch):
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def read_events(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return events


def test_none_shows_nothing_and_needs_nothing(world, tmp_path):
    tracker = build("none", tmp_path)
    tracker.log({"loss": 1.0}, 1)
    tracker.log_image("grid", tmp_path / "missing.png", 1)
    tracker.note("hello")
    tracker.finish()
    assert tracker.run_id is None
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_numbers_images_and_notes(world, tmp_path, picture):
    tracker = build("tensorboard", tmp_path / "run")
    tracker.log({"step": 3, "loss": 0.5, "images_per_second": None}, 3)
    tracker.log({"step": 4, "loss": 0.25, "lr": 1e-4}, 4)
    tracker.log_image("grid", picture, 4)
    tracker.note("resumed at step 2")
    tracker.finish()
    tracker.finish()
    events = read_events(tmp_path / "run" / "tensorboard")
    assert sorted(events.Tags()["scalars"]) == ["loss", "lr"]
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(3, 0.5), (4, 0.25)]
    (image,) = events.Images("grid")
    assert (image.step, image.width, image.height) == (4, 6, 4)
    assert sorted(events.Tags()["tensors"]) == ["config/text_summary", "note/text_summary"]


def test_a_tracker_leaves_the_process_group_and_the_launcher_alone(world, tmp_path, monkeypatch):
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for key, value in launcher.items():
        monkeypatch.setenv(key, value)
    group, threads = dist.group.WORLD, torch.get_num_threads()
    tracker = build("tensorboard", tmp_path)
    tracker.log({"loss": 1.0}, 1)
    tracker.finish()
    assert dist.group.WORLD is group
    assert {key: os.environ[key] for key in launcher} == launcher
    assert torch.get_num_threads() == threads


def test_wandb_gets_its_settings_and_every_step(world, tmp_path, wandb, picture):
    tracker = build("wandb", tmp_path, entity="team")
    tracker.log({"step": 3, "loss": 0.5, "grad_norm": None}, 3)
    tracker.log_image("grid", picture, 3)
    tracker.note("one")
    tracker.note("two")
    tracker.alert("Stopped", "api_key=hunter2")
    tracker.alert("Failed", "it broke")
    tracker.finish()
    tracker.finish()
    (init,) = wandb.of("init")
    assert init[0] == {
        "project": "p", "entity": "team", "name": "lora-c_tiny", "dir": str(tmp_path), "mode": "offline",
        "id": None, "resume": "allow", "settings": None,
    }  # fmt: skip
    assert wandb.of("config") == [(CONFIG, {"allow_val_change": True})]
    assert wandb.of("define_metric") == [("*", {"step_metric": "step"})]
    assert wandb.of("log") == [({"loss": 0.5, "step": 3},), ({"grid": [("image", (4, 6, 3))], "step": 3},)]
    assert wandb.run.notes == "one\ntwo"
    assert wandb.of("alert") == [
        ({"title": "Stopped", "text": "api_key=<redacted>", "level": "INFO"},),
        ({"title": "Failed", "text": "it broke", "level": "ERROR"},),
    ]
    assert wandb.of("finish") == [()]


def test_no_tracker_sees_a_secret_of_the_configuration_or_the_command_line(world, tmp_path, wandb, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["train", "task.api_token=abcdef0123456789"])
    start = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: seen.extend(sys.argv) or start(**given))
    config = {"data": {"urls": ["https://anna:hunter2@a.b/c.tar"]}, "task": {"api_token": "abcdef0123456789"}}
    monkeypatch.setitem(globals(), "CONFIG", config)
    build("wandb", tmp_path).finish()
    build("tensorboard", tmp_path).finish()
    (text,) = read_events(tmp_path / "tensorboard").Tensors("config/text_summary")[0].tensor_proto.string_val
    left = f"{seen} {wandb.of('config')} {text.decode()}"
    assert left.count("<redacted>") == 5
    assert "hunter2" not in left
    assert "abcdef0123456789" not in left
    assert sys.argv[1].endswith("abcdef0123456789"), "only the tracker is not told"


def test_other_ranks_know_the_run_id_but_show_nothing(world, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(tracking, "from_rank_zero", lambda start: "abc")
    tracker = build("tensorboard", tmp_path)
    tracker.log({"loss": 1.0}, 1)
    assert tracker.run_id == "abc"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_missing_library_names_the_extra(world, tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{name} is not installed. Install .*\.\[{name}\]', or choose tracker=none"):
        build(name, tmp_path)


@pytest.mark.parametrize(
    ("said", "shown"), [("api_key not configured", "api_key not configured"), ("", "RuntimeError")]
)
def test_a_wandb_that_cannot_start_is_a_config_error(world, tmp_path, wandb, monkeypatch, said, shown):
    def refuse(**arguments):
        raise RuntimeError(said)

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=rf"tracker\.name=wandb could not start: {shown}\. Remedy"):
        build("wandb", tmp_path)


def test_an_unknown_tracker_is_refused(world, tmp_path):
    with pytest.raises(ConfigError, match=r"tracker\.name=neptune is not one of none, aim, .*, wandb"):
        build("neptune", tmp_path)


def test_tensorboard_shows_steps_that_come_again_once(world, tmp_path):
    tracker = build("tensorboard", tmp_path)
    for step in (1, 2, 3):
        tracker.log({"loss": 1.0}, step)
    tracker.rewind(1)
    tracker.log({"loss": 0.5}, 2)
    tracker.finish()
    events = read_events(tmp_path / "tensorboard").Scalars("loss")
    assert [(each.step, each.value) for each in events] == [(1, 1.0), (2, 0.5)]


def test_a_tracker_takes_no_handlers_of_the_process(world, tmp_path, wandb, monkeypatch):
    start, handlers = wandb.init, (signal.getsignal(signal.SIGTERM), sys.excepthook)

    def takes_over(**given):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        monkeypatch.setattr(sys, "excepthook", print)
        return start(**given)

    monkeypatch.setattr(wandb, "init", takes_over)
    build("wandb", tmp_path).finish()
    assert (signal.getsignal(signal.SIGTERM), sys.excepthook) == handlers


@pytest.mark.parametrize("waiting", [0, 1000])
def test_a_tracker_that_hangs_is_left_behind(world, tmp_path, wandb, monkeypatch, caplog, waiting):
    tracker, hung, ended = build("wandb", tmp_path), threading.Event(), []
    monkeypatch.setattr(tracking, "SECONDS", 0.05)
    monkeypatch.setattr(tracking, "MOST_WAITING", waiting)
    wandb.run.log = lambda values: ended.append(hung.wait(60.0))
    for step in range(1, 4):
        tracker.log({"loss": 0.5}, step)
    tracker.finish()
    assert ended == []
    hung.set()
    assert caplog.text.count("The tracker failed (what it was sent has not ended within 0 s)") == 1
    assert wandb.of("finish") == []


def test_a_slow_tracker_does_not_hold_up_the_end(world, tmp_path, wandb, monkeypatch, caplog):
    tracker = build("wandb", tmp_path)
    monkeypatch.setattr(tracking, "SECONDS", 0.5)
    sent = []
    wandb.run.log = lambda values: (time.sleep(0.2), sent.append(values))
    for step in range(1, 50):
        tracker.log({"loss": 0.5}, step)
    tracker.finish()
    assert len(sent) < 49
    assert "The tracker failed (what it was sent has not ended within 0 s)" in caplog.text


def test_a_run_does_not_wait_for_a_slow_tracker_and_its_calls_keep_their_order(world, tmp_path, wandb, monkeypatch):
    tracker, answers, seen = build("wandb", tmp_path), threading.Event(), []
    wandb.run.log = lambda values: (answers.wait(60.0), seen.append(values["step"]))
    for step in range(1, 10):
        tracker.log({"loss": 0.5}, step)
    assert seen == []
    answers.set()
    tracker.finish()
    assert seen == list(range(1, 10))
    assert not tracker.failed
    assert wandb.of("finish") == [()]


def test_a_tracked_run_that_cannot_be_continued_is_followed_by_another(world, tmp_path, wandb, monkeypatch, caplog):
    """As where the tracker is another one now, or somebody has deleted the run there."""
    start = wandb.init

    def refuse_old(**arguments):
        if arguments["id"] is not None:
            raise RuntimeError("run abc was deleted")
        return start(**arguments)

    assert build("wandb", tmp_path, run_id="abc").run_id == wandb.of("init")[0][0]["id"] == "abc"
    monkeypatch.setattr(wandb, "init", refuse_old)
    assert build("wandb", tmp_path, run_id="abc").run_id == "new-id"
    assert "tracker.name=wandb could not continue its run abc (run abc was deleted) and begins another." in caplog.text


def test_a_tracker_that_fails_is_reported_once_and_ends_nothing(world, tmp_path, wandb, picture, caplog):
    tracker = build("wandb", tmp_path)

    def lost(*_, **__):
        raise ConnectionResetError("wandb-core is gone")

    wandb.run.log = wandb.run.finish = lost
    tracker.log({"loss": 0.5}, 1)
    tracker.log_image("grid", picture, 1)
    tracker.note("Stopped.")
    tracker.alert("Stopped", "Stopped.")
    tracker.finish()
    assert caplog.text.count("The tracker failed (ConnectionResetError: wandb-core is gone)") == 1
    assert wandb.of("finish") == []


@pytest.mark.parametrize("beside", [False, True])
def test_a_second_process_does_not_end_a_run_of_wandb_nor_wait_long_for_a_dead_server(
    world, tmp_path, monkeypatch, beside
):
    wandb = pytest.importorskip("wandb", reason="needs cascade-train[wandb]")
    begun = []

    def init(**given):
        begun.append(getattr(given.get("settings"), "x_update_finish_state", True))
        raise OSError("the server is dead")

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "7")
    given = {"project": "x", "entity": None, "mode": "online", "run_name": "r", "config": {}}
    for _ in range(2):
        with pytest.raises(ConfigError, match="wandb could not start: the server is dead.*tracker.mode=offline"):
            build_tracker("wandb", directory=tmp_path, run_id=None, beside=beside, **given)
        seconds = os.environ["WANDB_INIT_TIMEOUT"]
        monkeypatch.delenv("WANDB_INIT_TIMEOUT")
        assert seconds == ("15" if len(begun) == 2 else "7"), "the user's own stays"
    assert set(begun) == {not beside}
