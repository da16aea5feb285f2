"""Runs with a sample that spoils its step, and notes of which samples each step was trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cascade_train.batch import Batch
from cascade_train.engine.loop import Trainer
from cascade_train.tasks.text_to_image import TextToImage


def spoiling(key: str, factor: float) -> Callable[[TextToImage, Batch], Any]:
    """Return a `TextToImage.prepare_batch` that multiplies the loss of one sample whenever it comes."""
    prepare_batch = TextToImage.prepare_batch

    def prepare(self: TextToImage, batch: Batch) -> Any:
        factors = torch.tensor([factor if each == key else 1.0 for each in batch.keys])
        return prepare_batch(self, replace(batch, weight_B=factors * batch.weight_B))

    return prepare


def noting(file: Path) -> Callable[[Trainer, Sequence[Batch]], Any]:
    """Return a `Trainer.train_step` that appends [step, keys of its samples] to a file before it trains."""
    train_step = Trainer.train_step

    def step(self: Trainer, micro_batches: Sequence[Batch]) -> Any:
        keys = [key for batch in micro_batches for key in batch.keys]
        with file.open("a") as notes:
            notes.write(json.dumps([self.step + 1, keys]) + "\n")
        return train_step(self, micro_batches)

    return step


def noted(file: Path) -> list[tuple[int, list[str]]]:
    """Return the steps and keys that were noted, in the order of training."""
    return [(step, keys) for step, keys in map(json.loads, file.read_text().splitlines())]
