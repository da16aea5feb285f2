"""Where a run's numbers and images are shown: nowhere, tensorboard or wandb, through accelerate's trackers.

`metrics.jsonl` does not depend on any of this. accelerate and the trackers are imported only when chosen.
"""

from __future__ import annotations

import abc
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch.distributed as dist
import yaml
from PIL import Image

from cascade_train.distributed.consensus import from_rank_zero
from cascade_train.errors import ConfigError, install_hint
from cascade_train.redaction import redact, redact_argument, redacted

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T", bound="Tracker")

_LAUNCHER_VARIABLES = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""What makes accelerate believe that it should form a process group."""


def tolerated(method: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Let a tracker's method fail without ending the run: that is reported once, and nothing more is sent."""

    @functools.wraps(method)
    def tried(self: T, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.failed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # trackers raise many kinds
            self.failed = True
            log.warning(
                "The tracker failed (%s). The run goes on without it; metrics.jsonl has every step.",
                redact(f"{type(error).__name__}: {error}"),
            )

    return tried


class Tracker(abc.ABC):
    """Shows numbers and images of one run.

    Attributes:
        run_id: what continues the same tracked run after a resume, equal on all ranks; None where there is none.
        failed: whether it could not be reached, and nothing more is sent.
    """

    run_id: str | None = None
    failed = False

    @abc.abstractmethod
    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Show the numbers of one optimizer step; None is left out."""

    @abc.abstractmethod
    def log_image(self, name: str, path: Path, step: int) -> None:
        """Show an image file under a name that stays the same over the steps."""

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """Attach a sentence to the run."""

    def alert(self, title: str, text: str, *, failed: bool = False) -> None:
        """Notify the owner of the run, where the tracker can.

        Args:
            title: what happened, in a few words.
            text: the sentence that the terminal shows.
            failed: whether someone has to act.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Send what is left and close; later calls do nothing."""


class NullTracker(Tracker):
    """Shows nothing: for `tracker=none`, and for all ranks but 0."""

    def __init__(self, run_id: str | None = None) -> None:
        """Store."""
        self.run_id = run_id

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Do nothing."""

    def log_image(self, name: str, path: Path, step: int) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


class TensorBoardTracker(Tracker):
    """Event files under `<directory>/tensorboard`."""

    def __init__(self, *, directory: Path, config: Mapping[str, Any]) -> None:
        """Open the event file and show the config as text.

        Raises:
            ConfigError: tensorboard is not installed.
        """
        from accelerate.tracking import TensorBoardTracker as Accelerated

        with _single_process_accelerate():
            self._tracker = Accelerated("tensorboard", logging_dir=directory)
            self._tracker.main_process_only = False
            try:
                self._tracker.start()
            except ModuleNotFoundError as error:
                raise ConfigError(
                    "tracker.name=tensorboard: tensorboard is not installed. "
                    f"{install_hint('tensorboard')}, or choose tracker=none."
                ) from error
        self._open = True
        self._tracker.tracker.add_text("config", f"```yaml\n{yaml.safe_dump(dict(config), sort_keys=False)}```", 0)

    @tolerated
    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Add one scalar per number."""
        self._tracker.log({k: v for k, v in values.items() if v is not None and k != "step"}, step=step)

    @tolerated
    def log_image(self, name: str, path: Path, step: int) -> None:
        """Add the image."""
        self._tracker.log_images({name: _read_image(path)[None]}, step=step, dataformats="NHWC")

    @tolerated
    def note(self, text: str) -> None:
        """Add a text."""
        self._tracker.log({"note": text})

    @tolerated
    def finish(self) -> None:
        """Close the event file."""
        if self._open:
            self._open = False
            self._tracker.finish()


class WandbTracker(Tracker):
    """A Weights & Biases run, online or offline (files under `<directory>/wandb`)."""

    def __init__(
        self,
        *,
        directory: Path,
        config: Mapping[str, Any],
        project: str | None,
        entity: str | None,
        mode: str,
        run_name: str,
        run_id: str | None,
    ) -> None:
        """Start the run, or continue the one named `run_id`.

        Raises:
            ConfigError: wandb is not installed, or could not start.
        """
        _require_wandb()
        from accelerate.tracking import WandBTracker as Accelerated

        places = {"entity": entity, "name": run_name, "dir": str(directory), "mode": mode}
        with _single_process_accelerate():
            self._tracker = Accelerated(project, **places, id=run_id, resume="allow")
            try:
                self._tracker.start()
            except Exception as error:  # wandb raises many kinds; all mean that the run cannot be tracked
                raise ConfigError(
                    f"tracker.name=wandb could not start: {error}. Remedy: wandb login, or tracker.mode=offline, "
                    "or tracker=none"
                ) from error
            self._tracker.store_init_configuration(dict(config))
        # Steps go with the values, so that a resumed run may log a step again (wandb drops steps that go back).
        self._tracker.run.define_metric("*", step_metric="step")
        self.run_id = str(self._tracker.run.id)
        self._open = True

    @tolerated
    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Send the numbers of one step."""
        self._tracker.log({**{k: v for k, v in values.items() if v is not None}, "step": step})

    @tolerated
    def log_image(self, name: str, path: Path, step: int) -> None:
        """Send the image."""
        import wandb

        self._tracker.log({name: [wandb.Image(_read_image(path))], "step": step})

    @tolerated
    def note(self, text: str) -> None:
        """Add a line to the run's notes."""
        run = self._tracker.run
        run.notes = f"{run.notes}\n{text}" if run.notes else text

    @tolerated
    def alert(self, title: str, text: str, *, failed: bool = False) -> None:
        """Send an alert; who gets it, and how, is a setting of the user's account."""
        self._tracker.run.alert(title=title, text=redact(text), level="ERROR" if failed else "INFO")

    @tolerated
    def finish(self) -> None:
        """Send what is left and close the run."""
        if self._open:
            self._open = False
            self._tracker.finish()


def build_tracker(
    name: str,
    *,
    project: str | None,
    entity: str | None,
    mode: str,
    run_name: str,
    directory: Path,
    run_id: str | None,
    config: Mapping[str, Any],
) -> Tracker:
    """Start the tracker on rank 0, and a null one with the same `run_id` on the others. Collective.

    Args:
        name: "none", "tensorboard" or "wandb".
        project: wandb's project; None = wandb's default.
        entity: wandb's user or team; None = wandb's default.
        mode: wandb's "online" or "offline".
        run_name: what the run is called.
        directory: the run's directory.
        run_id: a tracked run to continue; None = a new one.
        config: the resolved config, shown with the run, secrets hidden.

    Raises:
        ConfigError: an unknown name, a missing library, or wandb could not start; on all ranks.
    """
    started: list[Tracker] = []
    config = redacted(config)

    def start() -> str | None:
        if name == "none":
            started.append(NullTracker(run_id))
        elif name == "tensorboard":
            started.append(TensorBoardTracker(directory=directory, config=config))
        elif name == "wandb":
            where = {"project": project, "entity": entity, "run_name": run_name, "run_id": run_id}
            started.append(WandbTracker(directory=directory, config=config, mode=mode, **where))  # type: ignore[arg-type]
        else:
            raise ConfigError(f"tracker.name={name} is not one of none, tensorboard, wandb")
        return started[0].run_id

    shared_id = from_rank_zero(start)
    return started[0] if dist.get_rank() == 0 else NullTracker(shared_id)


def _require_wandb() -> None:
    try:
        import wandb  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracker.name=wandb: wandb is not installed. {install_hint('wandb')}, or choose "
            "tracker=tensorboard or tracker=none."
        ) from error


@contextmanager
def _single_process_accelerate() -> Iterator[None]:
    """Give accelerate a process state of one CPU process, which its logger wants, and a command line without secrets.

    A tracker lives on rank 0 alone, so that is the truth about it. Left alone, accelerate would read the
    launcher's variables, look for devices, and set threads or form a process group of its own.
    """
    from accelerate import PartialState

    hidden = {key: os.environ.pop(key) for key in _LAUNCHER_VARIABLES if key in os.environ}
    arguments, sys.argv = sys.argv, [redact_argument(argument) for argument in sys.argv]  # which wandb sends along
    try:
        PartialState(cpu=True)
        yield
    finally:
        os.environ.update(hidden)
        sys.argv = arguments


def _read_image(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return (H, W, 3) uint8."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))
