"""A small network of every kind of parameter, bound to an optimizer of `conf/`, on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from cascade_train.assembly.build import build_node
from cascade_train.distributed import parallelize as seam
from cascade_train.distributed.parallelize import local, parallelize
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.lr_schedule import ConstantSchedule
from cascade_train.engine.phase import BoundPhase, trainable_parameters
from cascade_train.tasks.base import Phase

CONF = Path(__file__).parents[3] / "conf" / "optimizer"
OPTIONS = ("adafactor", "adamw", "adamw_8bit", "came", "lion", "muon", "prodigy", "schedule_free")
NEED_WHOLE = ("adafactor", "came", "prodigy")
"""Those that cannot work on parts of weights."""

QUICK = {"adafactor": 0.1, "muon": 1e-3, "prodigy": 1.0, "lion": 3e-3, "came": 1e-3}
"""Learning rates at which a few steps do something; 1e-2 for the others."""


def spec(option: str, **changes: Any) -> Any:
    """Construct an option of the group, with changes merged over it."""
    own = OmegaConf.load(CONF / f"{option}.yaml")
    base = OmegaConf.load(CONF / "torch.yaml") if own.pop("defaults", None) else {}
    return build_node(OmegaConf.merge(base, own, {"lr": QUICK.get(option, 1e-2)}, changes), "optimizer")


class Small(nn.Module):
    """Matrices with 128, 3 and 1 rows of 64 or 128, a kernel, a norm, a scale."""

    def __init__(self, *, row: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(64, 128)
        self.kernel = nn.Conv2d(128, 128, 3, padding=1, groups=128)
        self.norm = nn.LayerNorm(128)
        self.response = nn.ParameterDict({"gamma": nn.Parameter(torch.ones(1, 1, 1, 128))})
        self.last = nn.Linear(128, 3)
        self.row = nn.Linear(64, 1, bias=False) if row else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return (B, 3) of (B, 64)."""
        hidden = self.kernel(self.wide(inputs).relu()[:, :, None, None])[:, :, 0, 0]
        outputs = self.last(self.norm(hidden) * self.response["gamma"][0, 0])
        return outputs if self.row is None else outputs + self.row(inputs)


def bound(
    option: str,
    mesh: Any,
    *,
    start_step: int = 1,
    row: bool = True,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    **changes: Any,
) -> BoundPhase:
    """Return a phase on a new network, with the matrix of a single row or without; on one rank's mesh it is whole."""
    network = Small(row=row).to(dtype if stored is None else stored)
    parallelize(network, [], mesh=mesh, compute_dtype=dtype, reshard_after_forward=True, compile_units=False)
    phase = Phase(name="main", modules={"n": network}, units={"n": []}, loss=network, start_step=start_step)
    chosen = spec(option, **changes)
    return BoundPhase(
        phase,
        optimizer=chosen.build(trainable_parameters(phase), 1),
        base_lr=chosen.base_lr(1),
        lr_schedule=ConstantSchedule(warmup_steps=2),
        ema=None,
        max_grad_norm=1.0,
    )


def train(phase: BoundPhase, steps: range, *, rank: int = 0, ranks: int = 1) -> list[float]:
    """Take optimizer steps on a batch of 128 that is always the same, shared by the ranks; return their losses."""
    generator = torch.Generator().manual_seed(1)
    inputs, wanted = (torch.randn(128, size, generator=generator).chunk(ranks)[rank] for size in (64, 3))
    losses = []
    for step in steps:
        dtype = computes_in(phase)
        loss = (phase.phase.loss(inputs.to(dtype)) - wanted).square().mean()
        loss.backward()
        phase.clip()
        phase.update(step, 100, torch.tensor(0.0))
        losses.append(loss.item())
    return losses


def restored(phase: BoundPhase, store: CheckpointStore, path: Path) -> BoundPhase:
    """Load a checkpoint of a phase's state alone into a new phase, and return it."""
    state = phase.state_dict()
    store.load(path, state)
    phase.load_state_dict(state)
    return phase


def computes_in(phase: BoundPhase) -> torch.dtype:
    """Return the dtype of a phase's forward pass."""
    whole = seam._whole(phase.phase.modules["n"])
    return next(iter(phase.parameters.values())).dtype if whole is None else whole._dtype


def weights(phase: BoundPhase) -> list[torch.Tensor]:
    """Return a copy of this rank's parts of the weights that train."""
    return [local(p.detach()).clone() for p in phase.parameters.values()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Return whether weights are equal to the bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
