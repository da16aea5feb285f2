"""A toy task and feed that exercise the loop without any model of the package."""

from __future__ import annotations

import torch
from torch import nn

from cascade_train.batch import Batch
from cascade_train.tasks.base import Phase, StepOutput, Task

STAND_IN = 1000


class ToyTask(Task):
    """Fits a linear map from a batch's noise to zero; `poison` names samples whose loss is multiplied by `factor`."""

    fits = ("stage_c",)
    trains_network = True

    def __init__(self, poison: tuple[str, ...] = (), factor: float = float("nan")) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        self.poison, self.factor = poison, factor
        self.reports: list[dict[str, torch.Tensor]] = []

    def attach(self, stage, objective, device):
        """Nothing to attach."""

    def phases(self):
        units = [[layer] for layer in self.network]
        return [Phase(name="main", modules={"network": self.network}, units={"network": units}, loss=self.loss)]

    def prepare_batch(self, batch: Batch):
        bad = torch.tensor([self.factor if key in self.poison else 1.0 for key in batch.keys])
        return batch.normal("noise", (4,)), bad

    def loss(self, prepared) -> StepOutput:
        noise, bad = prepared
        loss_B = (self.network(noise).squeeze(1) - 1.0).square() * bad
        return StepOutput(loss_B=loss_B, report={"loss_raw": loss_B.detach() * 2})

    def measures(self, prepared, logsnr):
        return {f"loss_{level:g}": self.loss(prepared).loss_B.detach() + level for level in logsnr}

    def image_sampler(self, settings, size):
        raise NotImplementedError

    def exports(self):
        return {"toy": self.network}

    def after_step(self, report):
        self.reports.append({name: value.clone() for name, value in report.items()})
        return {}


class ToyFeed:
    """Endless micro-batches of numbered samples; sample 1000 + i stands in for an excluded sample i."""

    def __init__(self, *, global_batch_size: int, micro_batch_size: int, excluded: tuple[str, ...] = ()) -> None:
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.position = 0
        self.excluded = frozenset(excluded)

    def __iter__(self):
        while True:
            start = self.position * self.global_batch_size
            self.position += 1
            stop = start + self.global_batch_size
            micro_starts = range(start, stop, self.micro_batch_size)
            steps = [range(first, first + self.micro_batch_size) for first in micro_starts]
            yield [toy_batch(i + STAND_IN if f"toy:{i}" in self.excluded else i for i in step) for step in steps]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def toy_batch(ids) -> Batch:
    """Return a batch of the numbered samples, all in epoch 0."""
    index_B = torch.tensor(list(ids))
    names = tuple(f"toy:{i}" for i in index_B.tolist())
    return Batch(
        image_BCHW=torch.zeros(len(names), 3, 2, 2, dtype=torch.uint8),
        captions=names,
        keys=names,
        epoch_B=torch.zeros_like(index_B),
        index_B=index_B,
        seed=7,
    )
