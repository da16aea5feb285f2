"""Ranks that continue where others were stopped, and samples that spoil their step. Hooks of forked.py."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cascade_train.batch import Batch
from cascade_train.engine.loop import Trainer
from cascade_train.tasks.text_to_image import TextToImage

NOT_FINITE = "shapes-seed0:0000004"
"""One of 24 samples, which comes first in step 3."""


def note_keys(out: Path) -> None:
    """Append [step, keys of this rank's samples] to `<out>/keys_<rank>` before each step."""
    train_step = Trainer.train_step

    def step(self: Trainer, micro_batches: Any) -> Any:
        keys = [key for batch in micro_batches for key in batch.keys]
        with (out / f"keys_{self.world.rank}").open("a") as notes:
            notes.write(json.dumps([self.step + 1, keys]) + "\n")
        return train_step(self, micro_batches)

    Trainer.train_step = step


def cut_back(out: Path) -> None:
    """Begin with a copy of the run <name> as its first checkpoint left it, for a run <anything>_of_<name>."""
    note_keys(out)
    if int(os.environ.get("RANK", "0")) > 0:
        return
    copy = out.with_name(out.name.removesuffix("_notes"))
    shutil.copytree(copy.with_name(copy.name.partition("_of_")[2]), copy)
    _, *later = sorted((copy / "checkpoints").iterdir(), key=lambda path: int(path.name.rpartition("_")[2]))
    for path in (*later, copy / "export"):
        shutil.rmtree(path)


def spoil_one(out: Path) -> None:
    """Make one sample's loss not finite whenever it comes."""
    note_keys(out)
    prepare_batch = TextToImage.prepare_batch

    def prepare(self: TextToImage, batch: Batch) -> Any:
        factor_B = torch.tensor([float("nan") if key == NOT_FINITE else 1.0 for key in batch.keys])
        return prepare_batch(self, replace(batch, weight_B=factor_B * batch.weight_B))

    TextToImage.prepare_batch = prepare
