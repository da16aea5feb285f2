"""Where a run's numbers and images are shown: nowhere, TensorBoard or Weights & Biases.

`metrics.jsonl` does not depend on any of this. A tracker's library is imported only when it is chosen.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import yaml
from PIL import Image

from cascade_train.distributed.consensus import from_rank_zero
from cascade_train.errors import ConfigError, install_hint
from cascade_train.redaction import redact, redact_argument, redacted

log = logging.getLogger(__name__)


class Tracker:
    """Shows numbers and images of one run; this one, for `tracker=none` and for all ranks but 0, shows nothing.

    A failure never ends the run: the first is logged, and nothing more is sent.

    Attributes:
        run_id: continues the same tracked run after a resume, equal on all ranks; None where there is none.
        failed: nothing more is sent.
    """

    failed = False

    def __init__(self, run_id: str | None = None) -> None:
        self.run_id = run_id

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Show the numbers of one optimizer step; None is left out."""
        self._try(self._log, {name: value for name, value in values.items() if value is not None}, step)

    def log_image(self, name: str, path: Path, step: int) -> None:
        """Show an image file under a name that is the same at every step."""
        self._try(self._log_image, name, path, step)

    def note(self, text: str) -> None:
        """Attach a sentence to the run."""
        self._try(self._note, text)

    def alert(self, title: str, text: str, *, failed: bool = False) -> None:
        """Notify the owner of the run, where the tracker can; `failed`: somebody has to act."""
        self._try(self._alert, title, text, "ERROR" if failed else "INFO")

    def finish(self) -> None:
        """Send what is left and close; later calls do nothing."""
        self._try(self._finish)

    def _try(self, send: Callable[..., None], *args: Any) -> None:
        if self.failed:
            return
        try:
            send(*args)
        except Exception as error:  # trackers raise many kinds
            self.failed = True
            log.warning(
                "The tracker failed (%s). The run goes on without it; metrics.jsonl has every step.",
                redact(f"{type(error).__name__}: {error}"),
            )

    def _log(self, values: dict[str, Any], step: int) -> None: ...

    def _log_image(self, name: str, path: Path, step: int) -> None: ...

    def _note(self, text: str) -> None: ...

    def _alert(self, title: str, text: str, level: str) -> None: ...

    def _finish(self) -> None: ...


class TensorBoardTracker(Tracker):
    """Event files under `<directory>/tensorboard`."""

    def __init__(self, *, directory: Path, config: Mapping[str, Any]) -> None:
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ConfigError(
                "tracker.name=tensorboard: tensorboard is not installed. "
                f"{install_hint('tensorboard')}, or choose tracker=none."
            ) from error
        self._writer: Any = SummaryWriter(directory / "tensorboard")
        self._writer.add_text("config", f"```yaml\n{yaml.safe_dump(dict(config), sort_keys=False)}```", 0)

    def _log(self, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _log_image(self, name: str, path: Path, step: int) -> None:
        self._writer.add_image(name, _read_image(path), step, dataformats="HWC")

    def _note(self, text: str) -> None:
        self._writer.add_text("note", text)
        self._writer.flush()

    def _finish(self) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """A Weights & Biases run, online or offline (files under `<directory>/wandb`).

    Args:
        init: arguments of `wandb.init`; with the `id` of a run that is continued.
        config: shown with the run.
    """

    def __init__(self, *, init: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"tracker.name=wandb: wandb is not installed. {install_hint('wandb')}, or choose "
                "tracker=tensorboard or tracker=none."
            ) from error
        # wandb uploads the command line: without its secrets.
        arguments, sys.argv = sys.argv, [redact_argument(argument) for argument in sys.argv]
        try:
            self._run: Any = wandb.init(**init, resume="allow")
        except Exception as error:  # wandb raises many kinds; all mean that the run cannot be tracked
            raise ConfigError(
                f"tracker.name=wandb could not start: {error}. Remedy: wandb login, or tracker.mode=offline, "
                "or tracker=none"
            ) from error
        finally:
            sys.argv = arguments
        wandb.config.update(dict(config), allow_val_change=True)
        # Steps go with the values, so that a resumed run may log a step again (wandb drops steps that go back).
        self._run.define_metric("*", step_metric="step")
        super().__init__(str(self._run.id))
        self._image = wandb.Image
        self._open = True

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._run.log({**values, "step": step})

    def _log_image(self, name: str, path: Path, step: int) -> None:
        self._run.log({name: [self._image(_read_image(path))], "step": step})

    def _note(self, text: str) -> None:
        self._run.notes = f"{self._run.notes}\n{text}" if self._run.notes else text

    def _alert(self, title: str, text: str, level: str) -> None:
        self._run.alert(title=title, text=redact(text), level=level)  # who gets it is a setting of the user's account

    def _finish(self) -> None:
        if self._open:
            self._open = False
            self._run.finish()


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

    `name` is "none", "tensorboard" or "wandb"; `project` and `entity` (None = wandb's default) and `mode` ("online" or
    "offline") are wandb's. `run_id` continues a tracked run; None = a new one. `config` is shown with the run, secrets
    hidden. A ConfigError, on all ranks, where it cannot start.
    """
    started: list[Tracker] = []
    config = redacted(config)

    def start() -> str | None:
        if name == "none":
            started.append(Tracker(run_id))
        elif name == "tensorboard":
            started.append(TensorBoardTracker(directory=directory, config=config))
        elif name == "wandb":
            place = {"project": project, "entity": entity, "dir": str(directory), "mode": mode}
            started.append(WandbTracker(init={**place, "name": run_name, "id": run_id}, config=config))
        else:
            raise ConfigError(f"tracker.name={name} is not one of none, tensorboard, wandb")
        return started[0].run_id

    shared_id = from_rank_zero(start)
    return started[0] if dist.get_rank() == 0 else Tracker(shared_id)


def _read_image(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return (H, W, 3) uint8."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))
