"""The trackers beside tensorboard and wandb: by a stand-in that takes the calls of the real library alone, and by that
library itself where it is installed, offline: what it wrote is read back."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sqlite3
import sys
import zipfile
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from PIL import Image

from cascade_train.config.preflight import EXTRAS
from cascade_train.config.schema_outputs import TrackerName
from cascade_train.engine.trackers import TRACKERS, read_image
from cascade_train.engine.tracking import Tracker, build_tracker

LIBRARIES = {name: EXTRAS["tracker.name"][name] for name in TRACKERS if name not in ("tensorboard", "wandb")}
CONFIG = {
    "optimizer": {"lr": 0.1},
    "data": {"urls": ["a.tar"], "path": None},
    "run": {"dir": "/r", "api_key": "hunter2"},
}

MIRRORED = {
    "aim": """
        Run Run run_hash repo experiment force_resume system_tracking_interval capture_terminal_logs
        Image Image image
        Run().track Run.track value name step
        Run().log_info Run.log_info msg
        Run().log_error Run.log_error msg
        Run().close Run.close""",
    "clearml": """
        Task.set_offline Task.set_offline offline_mode
        Task.init Task.init project_name task_name reuse_last_task_id continue_last_task auto_connect_arg_parser \
            auto_connect_frameworks auto_resource_monitoring auto_connect_streams
        Task.init().connect_configuration Task.connect_configuration configuration name
        Task.init().get_logger Task.get_logger
        Task.init().get_logger().report_scalar Logger.report_scalar title series value iteration
        Task.init().get_logger().report_image Logger.report_image title series iteration local_path
        Task.init().set_comment Task.set_comment comment
        Task.init().mark_failed Task.mark_failed status_message
        Task.init().close Task.close""",
    "comet": """
        ExperimentConfig ExperimentConfig name offline_directory display_summary_level log_code log_graph parse_args \
            log_git_metadata log_git_patch log_env_details auto_output_logging auto_param_logging auto_metric_logging
        start start workspace project_name experiment_key online experiment_config
        start().get_key CometExperiment.get_key
        start().log_parameters CometExperiment.log_parameters parameters
        start().log_metrics CometExperiment.log_metrics dic step
        start().log_image CometExperiment.log_image image_data name step
        start().log_text CometExperiment.log_text text
        start().send_notification CometExperiment.send_notification title status
        start().end CometExperiment.end""",
    "dvclive": """
        Live Live dir resume save_dvc_exp dvcyaml
        Live().log_params Live.log_params params
        Live().log_metric Live.log_metric name val
        Live().log_image Live.log_image name val
        Live().sync Live.sync
        Live().end Live.end""",
    "mlflow": """
        MlflowClient MlflowClient tracking_uri
        MlflowClient().get_experiment_by_name MlflowClient.get_experiment_by_name name
        MlflowClient().create_run MlflowClient.create_run experiment_id run_name
        MlflowClient().get_run MlflowClient.get_run run_id
        MlflowClient().get_run().data.tags.get dict.get key default
        MlflowClient().update_run MlflowClient.update_run run_id status
        MlflowClient().log_dict MlflowClient.log_dict run_id dictionary artifact_file
        MlflowClient().log_batch MlflowClient.log_batch run_id metrics params
        MlflowClient().log_image MlflowClient.log_image run_id image key step
        MlflowClient().set_tag MlflowClient.set_tag run_id key value
        MlflowClient().set_terminated MlflowClient.set_terminated run_id status
        entities.Metric entities.Metric key value timestamp step
        entities.Param entities.Param key value""",
    "swanlab": """
        init init project workspace name log_dir mode id resume config settings
        Settings Settings interactive probe terminal
        Image Image data_or_path
        init().log Run.log data step
        init().finish Run.finish state error""",
    "trackio": """
        init init project name config resume embed auto_log_gpu auto_log_cpu
        Image Image value
        init().log Run.log metrics step
        init().alert Run.alert title text level
        init().finish Run.finish""",
}
"""The calls that we make: where, what that is in the real library, and the parameters that we give, by their names."""

SHOWN = {
    "aim": ["Run().track(0.5, name='loss', step=3)", "Run().log_error('Failed: it broke')"],
    "clearml": ["report_scalar('loss', 'run', 0.5, 3)", "mark_failed(status_message='it broke')"],
    "comet": ["log_metrics({'loss': 0.5}, step=3)", "send_notification('Failed: it broke', 'failed')"],
    "dvclive": ["log_metric('loss', 0.5)", "log_image('grid/3.png', "],
    "mlflow": ["Metric('loss', 0.5, ", "set_terminated('the-id', 'FAILED')"],
    "swanlab": ["log({'loss': 0.5}, step=3)", "finish('crashed', 'it broke')"],
    "trackio": ["log({'loss': 0.5}, step=3)", "alert('Failed', 'it broke', "],
}
"""What the real library is told of a step, and of a failure or a picture."""


def mirrored(name: str) -> dict[str, tuple[str, list[str]]]:
    lines = (line.split() for line in MIRRORED[name].replace("\\\n", "").splitlines() if line)
    return {mock: (real, parameters) for mock, real, *parameters in lines}


def start(name: str, folder: Path, run_id: str | None = None, mode: str = "offline") -> Tracker:
    place = {"project": "tests", "entity": None, "mode": mode, "run_name": "lora-c_tiny", "run_id": run_id}
    return build_tracker(name, directory=folder, config=CONFIG, **place)  # type: ignore[arg-type]


def tell(tracker: Tracker, folder: Path, steps: range, title: str) -> None:
    """Send what a run sends."""
    Image.new("RGB", (6, 4), "red").save(folder / "grid.png")
    tracker.rewind(steps[0] - 1)
    for step in steps:
        tracker.log({"step": step, "loss": 1.5 / step, "lr": None}, step)
    tracker.log_image("grid", folder / "grid.png", steps[-1])
    tracker.note(f"a note of step {steps[-1]}")
    tracker.alert(title, "it broke")
    tracker.finish()
    assert not tracker.failed


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)  # DVCLive changes a git repository
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    name: str = request.getfixturevalue("name")
    module = MagicMock(name=LIBRARIES[name])
    ids = dict.fromkeys(("hash", "id", "name", "get_key.return_value", "info.run_id"), "the-id")
    for started in (module.Run, module.Task.init, module.start, module.init, module.MlflowClient().create_run):
        started.return_value.configure_mock(**ids)
    module.mock_calls.clear()
    monkeypatch.setitem(sys.modules, LIBRARIES[name], module)
    monkeypatch.setitem(sys.modules, f"{LIBRARIES[name]}.entities", module.entities)
    return module


def test_every_tracker_is_a_choice_and_every_choice_a_tracker() -> None:
    assert {"none", *TRACKERS} == set(TrackerName)
    assert LIBRARIES.keys() == MIRRORED.keys() == SHOWN.keys()


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_tracker_calls_its_library_as_it_is(world: Any, tmp_path: Path, name: str, stand_in: MagicMock) -> None:
    tracker = start(name, tmp_path)
    assert tracker.run_id in ("the-id", None if name == "dvclive" else "the-id")
    tell(tracker, tmp_path, range(3, 4), "Failed")
    known = mirrored(name)
    for path, args, kwargs in stand_in.mock_calls:
        if "__" not in path:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters = [inspect.Parameter(each, kind, default=None) for each in known[path][1]]
            inspect.Signature(parameters).bind(*args, **kwargs)
            switched_on = {key for key, value in kwargs.items() if value is True}
            assert switched_on <= {"resume"}, "a library records nothing by itself (docs/trackers.md)"
    told = str(stand_in.mock_calls)
    assert all(each in told for each in SHOWN[name])
    assert "hunter2" not in told
    assert "<redacted>" in told


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_tracker_continues_the_run_it_is_given(world: Any, tmp_path: Path, name: str, stand_in: MagicMock) -> None:
    start(name, tmp_path, run_id="abc", mode="online")
    told = str(stand_in.mock_calls)
    assert ("'abc'" in told) == (name != "dvclive")
    assert str(tmp_path) not in told or name in ("comet", "dvclive", "swanlab"), "online, it is where its settings say"
    assert stand_in.MlflowClient().create_run.call_count == 0


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_run_and_its_resume_are_read_back_without_secrets(
    world: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip(LIBRARIES[name], reason=f"needs cascade-train[{name}]")
    check_stand_in(name, library)
    monkeypatch.setattr(sys, "argv", ["train", "task.api_token=abcdef0123456789"])
    first = start(name, tmp_path)
    tell(first, tmp_path, range(1, 4), "Stopped")
    second = start(name, tmp_path, run_id=first.run_id)
    tell(second, tmp_path, range(3, 5), "Finished")
    assert first.run_id == second.run_id
    assert set(READERS[name](tmp_path, first.run_id)) == {(step, 1.5 / step) for step in (1, 2, 3, 4)}
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert not [path for path, content in written.items() if b"abcdef0123456789" in content or b"hunter2" in content]


def check_stand_in(name: str, library: Any) -> None:
    """Check that what the stand-in takes is what the library takes."""
    if name == "mlflow":
        importlib.import_module("mlflow.entities")
    for real, parameters in mirrored(name).values():
        if real == "dict.get":
            continue
        found = inspect.signature(reduce(getattr, real.split("."), library)).parameters
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found.values()):
            assert set(parameters) <= found.keys(), real


def read_aim(folder: Path, run_id: str) -> list[tuple[int, float]]:
    import aim
    from aim.sdk.index_manager import RepoIndexManager

    RepoIndexManager.get_index_manager(aim.Repo.from_path(str(folder / "aim"))).index(run_id)
    run = aim.Run(run_id, repo=aim.Repo(str(folder / "aim")), read_only=True)
    assert run["config"]["optimizer"] == {"lr": 0.1}
    assert [each["name"] for each in run.collect_sequence_info(("images",))["images"]] == ["grid"]
    (loss,) = (each for each in run.metrics() if each.name == "loss")
    values = loss.values.sparse_list()[1]
    return [(round(1.5 / value), value) for value in values]  # steps are stored as hashes


def read_clearml(folder: Path, run_id: str) -> list[tuple[int, float]]:
    session = folder / "clearml" / "offline" / run_id
    task = json.loads((session / "task.json").read_text())
    assert "lr = 0.1" in task["configuration"]["config"]["value"]
    assert "a note of step 3\na note of step 4" in task["comment"]
    assert list(session.rglob("grid_run_*.png"))
    events = [event for line in (session / "metrics.jsonl").read_text().splitlines() for event in json.loads(line)]
    return [(event["iter"], event["value"]) for event in events if event.get("metric") == "loss"]


def read_comet(folder: Path, run_id: str) -> list[tuple[int, float]]:
    found, kinds = [], []
    for archive in (folder / "comet").glob(f"{run_id}-*.zip"):
        with zipfile.ZipFile(archive) as opened:
            messages = [json.loads(line) for line in opened.read("messages.json").splitlines()]
        kinds += [message["payload"].get("upload_type") for message in messages]
        metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
        found += [(each["step"], each["metricValue"]) for each in metrics if each["metricName"] == "loss"]
        assert "optimizer|lr" in str(messages)
    assert kinds.count("visualization") == kinds.count("text-sample") == 2
    return found


def read_dvclive(folder: Path, _: str | None) -> list[tuple[int, float]]:
    plots = folder / "dvclive" / "plots"
    assert {path.name for path in (plots / "images" / "grid").iterdir()} == {"3.png", "4.png"}
    rows = [row.split("\t") for row in (plots / "metrics" / "loss.tsv").read_text().splitlines()[1:]]
    assert [int(step) for step, _ in rows] == [1, 2, 3, 4], "step 3 replaced what was there"
    return [(int(step), float(value)) for step, value in rows]


def read_mlflow(folder: Path, run_id: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow/mlflow.db")
    run = client.get_run(run_id)
    assert (run.info.run_name, run.info.status, run.data.params["optimizer.lr"]) == ("lora-c_tiny", "FINISHED", "0.1")
    assert run.data.tags["mlflow.note.content"] == "a note of step 3\n\na note of step 4"
    assert {path.path for path in client.list_artifacts(run_id)} == {"config.yaml", "images"}
    return [(each.step, each.value) for each in client.get_metric_history(run_id, "loss")]


def read_swanlab(folder: Path, run_id: str) -> list[tuple[int, float]]:
    runs = sorted((folder / "swanlab").glob(f"run-*-{run_id}"))
    assert all("lr: 0.1" in (run / "files" / "config.yaml").read_text() for run in runs)
    assert [path.name[:3] for run in runs for path in (run / "media" / "image").iterdir()] == ["003", "004"]
    written = b"".join((run / f"run-{run_id}.swanlab").read_bytes() for run in runs)
    assert written.count(b"loss") >= 5
    return [(step, 1.5 / step) for step in (1, 2, 3, 4)]  # the file's form is the library's own


def read_trackio(folder: Path, run_id: str) -> list[tuple[int, float]]:
    database = sqlite3.connect(folder / "trackio" / "tests.db")
    rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert {row[0] for row in rows} == {run_id}
    shown = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert [step for step, metrics in shown if "grid" in metrics] == [3, 4]
    assert database.execute("select title, level from alerts").fetchall() == [("Stopped", "info"), ("Finished", "info")]
    return [(step, metrics["loss"]) for step, metrics in shown if "loss" in metrics]


READERS = {name: globals()[f"read_{name}"] for name in LIBRARIES}


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_an_image_of_any_mode_is_read_as_rgb(tmp_path: Path, mode: str) -> None:
    Image.linear_gradient("L").resize((6, 4)).convert(mode).save(tmp_path / "a.png")
    found = read_image(tmp_path / "a.png")
    assert (found.shape, str(found.dtype)) == ((4, 6, 3), "uint8")
    assert abs(found[:, 0, 1].astype(int) - [31, 95, 159, 223]).max() <= 30


@pytest.mark.parametrize("name", ["mlflow"])
def test_settings_are_sent_once_and_in_pieces_that_mlflow_takes(
    world: Any, tmp_path: Path, name: str, stand_in: MagicMock
) -> None:
    given = {"project": "tests", "entity": None, "mode": "online", "run_name": "r", "directory": tmp_path}
    for run_id in (None, "abc"):
        config = {"long": "x" * 600, **{f"key_{number}": number for number in range(199)}}
        build_tracker(name, config=config, run_id=run_id, **given).finish()  # type: ignore[arg-type]
    assert [len(call.kwargs["params"]) for call in stand_in.MlflowClient().log_batch.call_args_list] == [100, 100]
    sent = dict(call.args for call in stand_in.entities.Param.call_args_list)
    assert (len(sent), len(sent["long"]), sent["key_198"]) == (200, 500, "198")


@pytest.mark.parametrize("name", ["mlflow"])
def test_a_second_process_leaves_the_state_of_a_run_as_it_is(
    world: Any, tmp_path: Path, name: str, stand_in: MagicMock
) -> None:
    place = {"project": "tests", "entity": None, "mode": "online", "run_name": "r", "run_id": "abc"}
    for beside in (True, False):
        build_tracker(name, directory=tmp_path, config=CONFIG, beside=beside, **place).finish()  # type: ignore[arg-type]
        assert stand_in.MlflowClient().update_run.call_count == (not beside)
