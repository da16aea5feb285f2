"""How each tracker is started, and the few calls of its library by which a run is shown there.

A library is imported only when its tracker is chosen, and records nothing by itself: neither the command line and the
environment nor the output, which could hold secrets.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cascade_train.engine.run.config_difference import flatten
from cascade_train.files.durable import to_yaml
from cascade_train.files.untrusted import read_regular

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tracked run is to be found.

    Attributes:
        project: what the tracker groups runs by.
        entity: account or team that owns the project; None = the tracker's default.
        offline: reach no server.
        name: shown as the run's name.
        folder: of the tracker's files, in the run's folder.
        run_id: of a tracked run that is continued; None = a new one.
        beside: another process tracks the run too; whether it goes on is its to say.
    """

    project: str | None
    entity: str | None
    offline: bool
    name: str
    folder: Path
    run_id: str | None
    beside: bool = False


def nothing(*_: Any) -> None:
    """Stand for what a tracker has no call for."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What shows a started run, in the calls of its tracker's library.

    Attributes:
        run_id: continues the same tracked run after a resume; None where there is none.
        numbers: those of a step: values, step.
        image: a file under a name that is the same at every step: name, path, step.
        rewind: the steps after this one come again, where they would not be shown in their place: step.
        note: a sentence that stays with the run.
        alert: tells the owner of the run: Finished, Stopped or Failed, and how.
        finish: sends what is left and closes.
    """

    run_id: str | None = None
    numbers: Callable[[Values, int], object] = nothing
    image: Callable[[str, Path, int], object] = nothing
    rewind: Callable[[int], object] = nothing
    note: Callable[[str], object] = nothing
    alert: Callable[[str, str], object] = nothing
    finish: Callable[[], object] = nothing


def aim(place: Place, config: Values) -> Calls:
    """Start a run in the Aim repository of the current folder, or of its own. `aim-watcher` passes alerts on."""
    import aim

    if place.offline:
        place.folder.mkdir(exist_ok=True)
    run: Any = aim.Run(
        place.run_id,
        repo=str(place.folder) if place.offline else None,
        experiment=place.project,
        force_resume=place.run_id is not None,  # of a run that was killed
        system_tracking_interval=None,
        capture_terminal_logs=False,
    )
    run.name, run["config"] = place.name, config
    return Calls(
        run_id=run.hash,
        numbers=lambda values, step: [run.track(value, name=name, step=step) for name, value in values.items()],
        image=lambda name, path, step: run.track(aim.Image(str(path)), name=name, step=step),
        note=run.log_info,
        alert=lambda title, text: (run.log_error if title == "Failed" else run.log_info)(f"{title}: {text}"),
        finish=run.close,
    )


def clearml(place: Place, config: Values) -> Calls:
    """Start a task of ClearML, or a session to import later."""
    from clearml import Task

    if place.offline:
        os.environ["CLEARML_CACHE_DIR"] = str(place.folder)
    Task.set_offline(place.offline)
    task: Any = Task.init(
        place.project,
        place.name,
        reuse_last_task_id=place.run_id or False,
        continue_last_task=False if place.run_id is None else 0,  # 0: a step keeps its number
        auto_connect_arg_parser=False,
        auto_connect_frameworks={"detect_repository": False},
        auto_resource_monitoring=False,
        auto_connect_streams=False,
    )
    task.connect_configuration(config, name="config")
    shown = task.get_logger()
    return Calls(
        run_id=task.id,
        numbers=lambda values, step: [shown.report_scalar(name, "run", value, step) for name, value in values.items()],
        image=lambda name, path, step: shown.report_image(name, "run", step, local_path=str(path)),
        note=lambda text: task.set_comment(f"{task.comment or ''}\n{text}"),
        alert=lambda title, text: task.mark_failed(status_message=text) if title == "Failed" else None,
        finish=task.close,
    )


def comet(place: Place, config: Values) -> Calls:
    """Start an experiment of Comet, or an archive to upload later. Alerts are mails, where the account allows them."""
    os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"  # else it changes other libraries
    import comet_ml

    recorded = "log_code log_graph log_git_metadata log_git_patch log_env_details parse_args"
    quiet = dict.fromkeys(f"{recorded} auto_output_logging auto_param_logging auto_metric_logging".split(), False)
    run: Any = comet_ml.start(
        workspace=place.entity,
        project_name=place.project,
        experiment_key=place.run_id,
        online=not place.offline,
        experiment_config=comet_ml.ExperimentConfig(
            name=place.name, offline_directory=str(place.folder), display_summary_level=0, **quiet
        ),
    )
    run.log_parameters(config)
    return Calls(
        run_id=run.get_key(),
        numbers=lambda values, step: run.log_metrics(values, step=step),
        image=lambda name, path, step: run.log_image(str(path), name=name, step=step),
        note=run.log_text,
        alert=lambda title, text: run.send_notification(f"{title}: {text}", title.lower()),
        finish=run.end,
    )


def dvclive(place: Place, config: Values) -> Calls:
    """Write the tables and images of DVCLive."""
    from dvclive import Live

    if place.offline:
        os.environ["DVC_STUDIO_OFFLINE"] = "true"
    live: Any = Live(str(place.folder), resume=True, save_dvc_exp=False, dvcyaml=None)
    live.log_params(config)

    def numbers(values: Values, step: int) -> None:
        live.step = step
        for name, value in values.items():
            live.log_metric(name, value)
        live.sync()

    def rewind(step: int) -> None:
        for table in place.folder.glob("plots/metrics/**/*.tsv"):
            header, *rows = read_regular(table).decode().splitlines(keepends=True)
            table.write_text(header + "".join(row for row in rows if int(row.split("\t")[0]) <= step))

    return Calls(
        numbers=numbers,
        image=lambda name, path, step: live.log_image(f"{name}/{step}.png", str(path)),
        rewind=rewind,
        finish=live.end,
    )


def mlflow(place: Place, config: Values) -> Calls:
    """Start a run on MLflow's server or in the store of its settings, or in a database of its own."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    store, artifacts = None, None
    if place.offline:
        place.folder.mkdir(exist_ok=True)
        store, artifacts = f"sqlite:///{place.folder}/mlflow.db", (place.folder / "artifacts").as_uri()
    client: Any = MlflowClient(store)
    known = client.get_experiment_by_name(place.project)
    group = known.experiment_id if known else client.create_experiment(place.project, artifacts)
    run_id = place.run_id or client.create_run(group, run_name=place.name).info.run_id
    if not place.beside:
        client.update_run(run_id, status="RUNNING")
    client.log_dict(run_id, config, "config.yaml")
    settings = [Param(key, str(value)[:500]) for key, value in flatten(config).items()]
    for begin in range(0, len(settings) if place.run_id is None else 0, 100):  # they never change
        client.log_batch(run_id, params=settings[begin : begin + 100])

    def numbers(values: Values, step: int) -> None:
        now = int(1000 * time.time())
        client.log_batch(run_id, [Metric(name, value, now, step) for name, value in values.items()])

    def note(text: str) -> None:
        before = client.get_run(run_id).data.tags.get("mlflow.note.content", "")
        client.set_tag(run_id, "mlflow.note.content", f"{before}\n\n{text}".strip())

    states = {"Finished": "FINISHED", "Stopped": "KILLED", "Failed": "FAILED"}
    return Calls(
        run_id=run_id,
        numbers=numbers,
        image=lambda name, path, step: client.log_image(run_id, read_image(path), key=name, step=step),
        note=note,
        alert=lambda title, text: client.set_terminated(run_id, states[title]),
    )


def swanlab(place: Place, config: Values) -> Calls:
    """Start an experiment of SwanLab, or files to sync later."""
    import swanlab

    probe = dict.fromkeys(("hardware", "runtime", "requirements", "git", "monitor"), False)
    run: Any = swanlab.init(
        project=place.project,
        workspace=place.entity,
        name=place.name,
        log_dir=str(place.folder),
        mode="offline" if place.offline else "online",
        id=place.run_id,
        resume="allow",
        config=config,
        settings=swanlab.Settings(interactive=False, probe=probe, terminal={"proxy_type": "none"}),
    )
    run._is_main_thread = False  # a thread finishes it, which may not put back the handler that it set for Ctrl-C
    end = {"Finished": "success", "Stopped": "aborted", "Failed": "crashed"}
    return Calls(
        run_id=run.id,
        numbers=lambda values, step: run.log(values, step=step),
        image=lambda name, path, step: run.log({name: swanlab.Image(read_image(path))}, step=step),
        alert=lambda title, text: run.finish(end[title], None if title == "Finished" else text),
        finish=lambda: run.finish() if run.alive else None,
    )


def tensorboard(place: Place, config: Values) -> Calls:
    """Write event files of TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    writers: list[Any] = [SummaryWriter(place.folder)]
    writers[-1].add_text("config", f"```yaml\n{to_yaml(config)}```", 0)

    def numbers(values: Values, step: int) -> None:
        for name, value in values.items():
            writers[-1].add_scalar(name, value, step)
        writers[-1].flush()

    def rewind(step: int) -> None:
        writers[-1].close()
        writers.append(SummaryWriter(place.folder, purge_step=step + 1))

    return Calls(
        numbers=numbers,
        image=lambda name, path, step: writers[-1].add_image(name, read_image(path), step, dataformats="HWC"),
        rewind=rewind,
        note=lambda text: writers[-1].add_text("note", text),
        finish=lambda: writers[-1].close(),
    )


def trackio(place: Place, config: Values) -> Calls:
    """Start a run in trackio's local store, or where its variables say; TRACKIO_WEBHOOK_URL gets alerts."""
    for key in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL") if place.offline else ():
        os.environ.pop(key, None)
    import trackio

    run: Any = trackio.init(
        place.project,
        place.run_id or f"{place.name}-{uuid.uuid4().hex[:8]}",  # runs are found by names, which must differ
        config=config,
        resume="never" if place.run_id is None else "allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    levels = trackio.AlertLevel
    return Calls(
        run_id=run.name,
        numbers=lambda values, step: run.log(values, step=step),
        image=lambda name, path, step: run.log({name: trackio.Image(read_image(path))}, step=step),
        alert=lambda title, text: run.alert(title, text, levels.ERROR if title == "Failed" else levels.INFO),
        finish=run.finish,
    )


def wandb(place: Place, config: Values) -> Calls:
    """Start a run of Weights & Biases, or files to sync later. Who gets alerts is a setting of the user's account."""
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "15")  # s; wandb's own 90 hold up a start whose server is dead
    import wandb

    settings = wandb.Settings(x_update_finish_state=False) if place.beside else None
    run: Any = wandb.init(
        project=place.project,
        entity=place.entity,
        dir=str(place.folder.parent),
        mode="offline" if place.offline else "online",
        name=place.name,
        id=place.run_id,
        resume="allow",
        settings=settings,
    )
    wandb.config.update(config, allow_val_change=True)
    # Steps go with the values, so that a resumed run may log a step again (wandb drops steps that go back).
    run.define_metric("*", step_metric="step")

    def note(text: str) -> None:
        run.notes = f"{run.notes}\n{text}" if run.notes else text

    return Calls(
        run_id=run.id,
        numbers=lambda values, step: run.log({**values, "step": step}),
        image=lambda name, path, step: run.log({name: [wandb.Image(read_image(path))], "step": step}),
        note=note,
        alert=lambda title, text: run.alert(title=title, text=text, level="ERROR" if title == "Failed" else "INFO"),
        finish=run.finish,
    )


TRACKERS: dict[str, Callable[[Place, Values], Calls]] = {
    start.__name__: start for start in (aim, clearml, comet, dvclive, mlflow, swanlab, tensorboard, trackio, wandb)
}
"""By their names in `tracker=`, which are those of their extras and of their folders in a run's."""


def read_image(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return (H, W, 3) uint8."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))
