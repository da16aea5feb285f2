"""Trains on the host, then on the pretended device: three steps each, without a run's end, and what was noted in them.

usage: runs.py FOLDER, in which is runs.json: by name, {"overrides": [...], "planted": whether losses make mistakes}

Writes found.json: by name, {"host": metrics of each step, "device": the same, "noted": [[kind, operation, where], ...]
of the last step}.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cascade_train.__main__ import launch
from cascade_train.distributed import parallelize, process_group
from cascade_train.engine.loop import Trainer
from cascade_train.tasks.text_to_image import TextToImage

STEPS = 3
SAID: dict[str, Any] = {}
PLANTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda loss_B: loss_B.sum().item(),
    "cpu": lambda loss_B: loss_B.detach().cpu(),
    "mask": lambda loss_B: loss_B[loss_B > 0],
    "branch": lambda loss_B: 1 if loss_B.sum() > 0 else 0,
    "mix": lambda loss_B: loss_B + torch.ones(len(loss_B)),
    "copy": lambda loss_B: loss_B + torch.ones(len(loss_B)).to(loss_B.device),
}


def steps(self: Trainer) -> None:
    """Train some steps in place of `Trainer.run`, and stop there."""
    from tests.pretended.device import SEEN

    feed, measured = iter(self.feed), []
    for _ in range(STEPS):
        batches = next(feed)
        SEEN.clear()
        measured.append(self.train_step(batches))
        noted = list(SEEN.elements())
    SAID.update(metrics=[{name: float(each) for name, each in values.items()} for values in measured], noted=noted)
    self.stopped = "seen"


def join_on_the_device() -> process_group.World:
    """Be the one rank of a group, on the device."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    process_group.set_timeout([], process_group.SET_UP_SECONDS)
    from tests.pretended.device import DEVICE

    return process_group.World(rank=0, ranks=1, machine_ranks=1, device=DEVICE)


def move(tensors: Any, device: torch.device) -> None:
    """Move in place as `parallelize.move` does: `tensor.data =` takes no tensor of another class."""
    for tensor in tensors:
        if not tensor.is_meta and tensor.device.type != device.type:
            moved = tensor.data.to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad) if is_parameter else moved
            torch.utils.swap_tensors(tensor, moved)


def with_mistakes(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss that makes all the mistakes."""

    def mistaken(self: TextToImage, prepared: Any) -> Any:
        output = loss(self, prepared)
        for mistake in PLANTED.values():
            mistake(output.loss_B)
        return output

    return mistaken


def trained(overrides: list[str], out: Path) -> Any:
    """Return what was seen in a run's steps."""
    shutil.rmtree(out, ignore_errors=True)
    code = launch([*overrides, f"run.dir={out}"])
    assert code == 75, f"exit code {code} of {overrides}"  # stopped
    return dict(SAID)


def main() -> None:
    """Do all runs on the host, then all on the device, which torch must know before the first backward."""
    importlib.import_module("tests.pretended.device")
    importlib.import_module("tests.warm.quick").compose_quickly()
    folder = Path(sys.argv[1])
    runs = json.loads((folder / "runs.json").read_text())
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(False)  # of attention on the host: it sums otherwise
    Trainer.run = steps
    host = {name: trained(run["overrides"], folder / "run") for name, run in runs.items()}
    process_group._join, parallelize.move = join_on_the_device, move
    found, loss = {}, TextToImage.loss
    for name, run in runs.items():
        TextToImage.loss = with_mistakes(loss) if run["planted"] else loss
        seen = trained(run["overrides"], folder / "run")
        found[name] = {"host": host[name]["metrics"], "device": seen["metrics"], "noted": seen["noted"]}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
