"""What the original trainer does beside what its file says, as keys: the switches of docs/differences.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cascade_train.errors import ConfigError

BEHAVIOURS = ("original", "ours")
ADAPTERS = {"task.init": "original", "task.alpha": 1.0, "task.joint_qkv": True}
"""Belong together: the learning rates of the original's recipes are made for these first values at this scale."""


def check_behaviour(behaviour: str | None) -> None:
    """Check the argument of the verb.

    Raises:
        ConfigError: no such behaviour.
    """
    if behaviour is not None and behaviour not in BEHAVIOURS:
        raise ConfigError(f"behaviour={behaviour} is unknown: choose {' or '.join(BEHAVIOURS)}.")


def original_behaviour(given: Mapping[str, Any], *, task: str, is_stage_b: bool) -> dict[str, Any]:
    """Return the keys that make this library do as the original, of all rows that a recipe's task touches.

    Args:
        given: keys and values of the original's file.
        task: option of the group task.
        is_stage_b: whether Stage B is trained, else Stage C.
    """
    several_shapes = "multi_aspect_ratio" in given
    values: dict[str, Any] = {
        "data.replacement": True,
        "data.crop": "random" if several_shapes else "saliency",
        "optimizer.decay": "all",
        "lr_scheduler.from_zero": True,
    }
    values |= {"objective.noise.square_grids": True} if is_stage_b else {"model.image_encoder.antialias": False}
    if several_shapes:
        values |= {"data.buckets.distance": "linear", "data.buckets.random_share": 0.05}
    if given.get("adaptive_loss_weight"):
        values |= {"objective.loss_weight.update": "micro_batch", "objective.loss_weight.duplicates": "last"}
    return values | (ADAPTERS if task == "lora" else {})


def describe(behaviour: str, values: Mapping[str, Any]) -> str:
    """Return one sentence for the report and the file: which behaviour was chosen, and what that means.

    Args:
        behaviour: that was chosen.
        values: what the original's sets, chosen or not.
    """
    keys = ", ".join(f"{key}={str(value).lower()}" for key, value in values.items())
    if behaviour == "original":
        return (
            f"behaviour=original: set as the original trainer does, where this library does otherwise: {keys}. What has"
            " no key is in docs/differences.md. behaviour=ours leaves these to this library."
        )
    return f"behaviour=ours: left to this library, docs/differences.md says why. behaviour=original sets {keys}."
