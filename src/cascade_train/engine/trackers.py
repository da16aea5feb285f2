"""How each tracker is started, and the calls that show a run: by hand for tensorboard and wandb, else by accelerate.

A library is imported only when its tracker is chosen. Its own recording of command line, environment and output is
switched off: they could contain secrets.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cascade_train.engine.run.config_difference import flatten
from cascade_train.files.durable import to_yaml

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

    `rewind` expects steps once more; `alert` gets Finished, Stopped or Failed.
    """

    run_id: str | None = None
    numbers: Callable[[Values, int], object] | None = None
    image: Callable[[str, Path, int], object] | None = None
    rewind: Callable[[int], object] | None = None
    note: Callable[[str], object] | None = None
    alert: Callable[[str, str], object] | None = None
    finish: Callable[[], object] | None = None


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


LIBRARIES = {name: name for name in ("aim", "clearml", "dvclive", "mlflow", "swanlab", "trackio")} | {
    "comet": "comet_ml"
}
"""Trackers of accelerate, by their names in `tracker=`: what accelerate calls them."""


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """A log for accelerate, whose own wants a `PartialState`, which would take over the process group."""

    warning_once = logging.LoggerAdapter.debug


def by_accelerate(name: str, target: Destination, config: Values) -> Calls:
    """Start a tracker of accelerate. A run that continues keeps the configuration that it has."""
    from accelerate import tracking

    tracking.logger = _Logger(logging.getLogger(__name__), {})
    kind: Any = tracking.LOGGER_TYPE_TO_CLASS[LIBRARIES[name]]
    tracker = type(kind.__name__, (kind,), {"main_process_only": False})(**_options(name, target))
    tracker.start()
    run_id = _run_id(name, tracker.tracker)
    if target.run_id is None:
        tracker.store_init_configuration(flatten(config))
    named = {"run_id": run_id} if name == "mlflow" else {}  # it looks for its run in the thread that sends
    return Calls(
        run_id=run_id,
        numbers=lambda values, step: tracker.log(values, step=step, **named),
        image=partial(_log_image, tracker, in_list=name == "swanlab") if hasattr(kind, "log_images") else None,
        finish=tracker.finish,
    )


def _log_image(tracker: Any, name: str, path: Path, step: int, *, in_list: bool) -> None:
    image = read_image(path)
    tracker.log_images({name: [image] if in_list else image}, step=step)


def _options(name: str, target: Destination) -> Values:
    """Arguments of accelerate's tracker; sets the variables by which a library learns that it is offline."""
    folder, is_new = str(target.folder), target.run_id is None
    place: Values
    quiet: Values
    run: Values
    if name == "aim":
        place = {"logging_dir": folder if target.offline else None, "experiment": target.project}
        quiet = {"system_tracking_interval": None, "capture_terminal_logs": False}
        return {"run_name": target.name, "run_hash": target.run_id, "force_resume": not is_new, **place, **quiet}
    if name == "clearml":
        os.environ |= {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": folder} if target.offline else {}
        resumed = {"reuse_last_task_id": target.run_id or False, "continue_last_task": False if is_new else 0}
        parts = ("arg_parser", "streams")
        quiet = {**{f"auto_connect_{part}": False for part in parts}, "auto_resource_monitoring": False}
        quiet["auto_connect_frameworks"] = {"detect_repository": False}
        return {"project_name": target.project, "task_name": target.name, **resumed, **quiet}
    if name == "comet":
        os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"  # else it changes other libraries
        import comet_ml

        recorded = "log_code log_graph log_git_metadata log_git_patch log_env_details parse_args"
        quiet = dict.fromkeys(f"{recorded} auto_output_logging auto_param_logging auto_metric_logging".split(), False)
        own = {"name": target.name, "offline_directory": folder, "display_summary_level": 0}
        settings = comet_ml.ExperimentConfig(**own, **quiet)
        place = {"workspace": target.entity, "online": not target.offline, "experiment_key": target.run_id}
        return {"run_name": target.project, "experiment_config": settings, **place}
    if name == "dvclive":
        os.environ |= {"DVC_STUDIO_OFFLINE": "true"} if target.offline else {}
        return {"dir": folder, "resume": True, "save_dvc_exp": False, "dvcyaml": None}
    if name == "mlflow":
        if target.offline:
            target.folder.mkdir(exist_ok=True)
            os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        artifacts = (target.folder / "artifacts").as_uri() if target.offline else None
        run = {"run_id": target.run_id, "run_name": target.name}
        return {"experiment_name": target.project, "logging_dir": artifacts, **run}
    if name == "swanlab":
        import swanlab

        probe = dict.fromkeys(("hardware", "runtime", "requirements", "git", "monitor"), False)
        settings = swanlab.Settings(interactive=False, probe=probe, terminal={"proxy_type": "none"})
        place = {"log_dir": folder, "mode": "offline" if target.offline else "online", "workspace": target.entity}
        run = {"name": target.name, "id": target.run_id, "resume": "allow", "settings": settings}
        return {"run_name": target.project, **place, **run}
    for key in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL") if target.offline else ():
        os.environ.pop(key, None)
    unique = target.run_id or f"{target.name}-{uuid.uuid4().hex[:8]}"  # runs are found by names, which must differ
    quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    return {"run_name": target.project, "name": unique, "resume": "never" if is_new else "allow", **quiet}


def _run_id(name: str, run: Any) -> str | None:
    """What continues a tracked run; None where its folder does."""
    match name:
        case "aim":
            run_id = run.hash
        case "comet":
            run_id = run.get_key()
        case "dvclive":
            return None
        case "mlflow":
            run_id = run.info.run_id
        case "trackio":
            run_id = run.name
        case _:
            run_id = run.id
    if name == "swanlab":
        run._is_main_thread = False  # a thread finishes it, which may not put back the handler that it set for Ctrl-C
    return str(run_id)


TRACKERS: dict[str, Callable[[Destination, Values], Calls]] = {
    **{name: partial(by_accelerate, name) for name in sorted(LIBRARIES)},
    "tensorboard": tensorboard,
    "wandb": wandb,
}
"""By their names in `tracker=`, which are those of their extras and of their folders in a run's."""


def read_image(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """(H, W, 3) uint8."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))
