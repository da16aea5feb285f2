"""How each tracker is started, and the calls of its library that show a run.

A library is imported only when its tracker is chosen. Its own recording of command line, environment and output is
switched off: they could contain secrets.
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
class Destination:
    """Where a run is shown.

    `entity` is the account or team of the project, `folder` the tracker's own in the run's, `run_id` that of a tracked
    run to continue; None = the tracker's default, or a new run. `beside`: another process tracks the run and ends it.
    """

    project: str | None
    entity: str | None
    offline: bool
    name: str
    folder: Path
    run_id: str | None
    beside: bool = False


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What shows a started run, see the methods of `Tracker`; None = the tracker has no such call.

    `rewind` is for trackers that would show a repeated step twice; `alert` gets Finished, Stopped or Failed.
    """

    run_id: str | None = None
    numbers: Callable[[Values, int], object] | None = None
    image: Callable[[str, Path, int], object] | None = None
    rewind: Callable[[int], object] | None = None
    note: Callable[[str], object] | None = None
    alert: Callable[[str, str], object] | None = None
    finish: Callable[[], object] | None = None


def aim(target: Destination, config: Values) -> Calls:
    """Start a run in the Aim repository of the current folder, or of its own. `aim-watcher` passes alerts on."""
    import aim

    if target.offline:
        target.folder.mkdir(exist_ok=True)
    run: Any = aim.Run(
        target.run_id,
        repo=str(target.folder) if target.offline else None,
        experiment=target.project,
        force_resume=target.run_id is not None,  # of a run that was killed
        system_tracking_interval=None,
        capture_terminal_logs=False,
    )
    run.name, run["config"] = target.name, config
    return Calls(
        run_id=run.hash,
        numbers=lambda values, step: [run.track(value, name=name, step=step) for name, value in values.items()],
        image=lambda name, path, step: run.track(aim.Image(str(path)), name=name, step=step),
        note=run.log_info,
        alert=lambda title, text: (run.log_error if title == "Failed" else run.log_info)(f"{title}: {text}"),
        finish=run.close,
    )


def clearml(target: Destination, config: Values) -> Calls:
    """Start a task of ClearML, or a session to import later."""
    from clearml import Task

    if target.offline:
        os.environ["CLEARML_CACHE_DIR"] = str(target.folder)
    Task.set_offline(target.offline)
    task: Any = Task.init(
        target.project,
        target.name,
        reuse_last_task_id=target.run_id or False,
        continue_last_task=False if target.run_id is None else 0,  # 0: a step keeps its number
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


def comet(target: Destination, config: Values) -> Calls:
    """Start an experiment of Comet, or an archive to upload later. Alerts are mails, if the account allows them."""
    os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"  # else it changes other libraries
    import comet_ml

    recorded = "log_code log_graph log_git_metadata log_git_patch log_env_details parse_args"
    quiet = dict.fromkeys(f"{recorded} auto_output_logging auto_param_logging auto_metric_logging".split(), False)
    run: Any = comet_ml.start(
        workspace=target.entity,
        project_name=target.project,
        experiment_key=target.run_id,
        online=not target.offline,
        experiment_config=comet_ml.ExperimentConfig(
            name=target.name, offline_directory=str(target.folder), display_summary_level=0, **quiet
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


def dvclive(target: Destination, config: Values) -> Calls:
    """Write the tables and images of DVCLive."""
    from dvclive import Live

    if target.offline:
        os.environ["DVC_STUDIO_OFFLINE"] = "true"
    live: Any = Live(str(target.folder), resume=True, save_dvc_exp=False, dvcyaml=None)
    live.log_params(config)

    def numbers(values: Values, step: int) -> None:
        live.step = step
        for name, value in values.items():
            live.log_metric(name, value)
        live.sync()

    def rewind(step: int) -> None:
        for table in target.folder.glob("plots/metrics/**/*.tsv"):
            header, *rows = read_regular(table).decode().splitlines(keepends=True)
            table.write_text(header + "".join(row for row in rows if int(row.split("\t")[0]) <= step))

    return Calls(
        numbers=numbers,
        image=lambda name, path, step: live.log_image(f"{name}/{step}.png", str(path)),
        rewind=rewind,
        finish=live.end,
    )


def mlflow(target: Destination, config: Values) -> Calls:
    """Start a run on MLflow's server or in the store of its settings, or in a database of its own."""
    from mlflow import MlflowClient, entities

    store, artifacts = None, None
    if target.offline:
        target.folder.mkdir(exist_ok=True)
        store, artifacts = f"sqlite:///{target.folder}/mlflow.db", (target.folder / "artifacts").as_uri()
    client: Any = MlflowClient(store)
    existing = client.get_experiment_by_name(target.project)
    group = existing.experiment_id if existing else client.create_experiment(target.project, artifacts)
    run_id = target.run_id or client.create_run(group, run_name=target.name).info.run_id
    if not target.beside:
        client.update_run(run_id, status="RUNNING")
    client.log_dict(run_id, config, "config.yaml")
    settings = [entities.Param(key, str(value)[:500]) for key, value in flatten(config).items()]
    for begin in range(0, len(settings) if target.run_id is None else 0, 100):  # they never change
        client.log_batch(run_id, params=settings[begin : begin + 100])

    def numbers(values: Values, step: int) -> None:
        now = int(1000 * time.time())
        client.log_batch(run_id, [entities.Metric(name, value, now, step) for name, value in values.items()])

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


def swanlab(target: Destination, config: Values) -> Calls:
    """Start an experiment of SwanLab, or files to sync later."""
    import swanlab

    probe = dict.fromkeys(("hardware", "runtime", "requirements", "git", "monitor"), False)
    run: Any = swanlab.init(
        project=target.project,
        workspace=target.entity,
        name=target.name,
        log_dir=str(target.folder),
        mode="offline" if target.offline else "online",
        id=target.run_id,
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


def tensorboard(target: Destination, config: Values) -> Calls:
    """Write event files of TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    writers: list[Any] = [SummaryWriter(target.folder)]
    writers[-1].add_text("config", f"```yaml\n{to_yaml(config)}```", 0)

    def numbers(values: Values, step: int) -> None:
        for name, value in values.items():
            writers[-1].add_scalar(name, value, step)
        writers[-1].flush()

    def rewind(step: int) -> None:
        writers[-1].close()
        writers.append(SummaryWriter(target.folder, purge_step=step + 1))

    return Calls(
        numbers=numbers,
        image=lambda name, path, step: writers[-1].add_image(name, read_image(path), step, dataformats="HWC"),
        rewind=rewind,
        note=lambda text: writers[-1].add_text("note", text),
        finish=lambda: writers[-1].close(),
    )


def trackio(target: Destination, config: Values) -> Calls:
    """Start a run in trackio's local store, or where its variables say; TRACKIO_WEBHOOK_URL gets alerts."""
    for key in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL") if target.offline else ():
        os.environ.pop(key, None)
    import trackio

    run: Any = trackio.init(
        target.project,
        target.run_id or f"{target.name}-{uuid.uuid4().hex[:8]}",  # runs are found by names, which must differ
        config=config,
        resume="never" if target.run_id is None else "allow",
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


def wandb(target: Destination, config: Values) -> Calls:
    """Start a run of Weights & Biases, or files to sync later. Who gets alerts is a setting of the user's account."""
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "15")  # s; wandb's own 90 hold up a start whose server is dead
    import wandb

    settings = wandb.Settings(x_update_finish_state=False) if target.beside else None
    run: Any = wandb.init(
        project=target.project,
        entity=target.entity,
        dir=str(target.folder.parent),
        mode="offline" if target.offline else "online",
        name=target.name,
        id=target.run_id,
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


TRACKERS: dict[str, Callable[[Destination, Values], Calls]] = {
    start.__name__: start for start in (aim, clearml, comet, dvclive, mlflow, swanlab, tensorboard, trackio, wandb)
}
"""By their names in `tracker=`, which are those of their extras and of their folders in a run's."""


def read_image(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return (H, W, 3) uint8."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))
