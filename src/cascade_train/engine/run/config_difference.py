"""Which settings differ between two configs, and which of the loop's own a continued run may change.

For the options of components see cascade_train/options.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

_FREE_NODES = (
    "run", "log", "sample", "checkpoint", "tracker", "profile", "validate", "optimizer", "lr_scheduler",
    "parallel", "memory",
)  # fmt: skip
"""Nodes below which a continued run may change everything."""

_FREE_KEYS = (
    "train.max_steps", "train.max_epochs", "train.micro_batch_size", "compile", "compile_fallback",
    "activation_checkpointing", "attention", "train.max_grad_norm", "ema.start_step", "ema.every_steps", "ema.device",
    "ema.ramp",
)  # fmt: skip

_FREE_NUMBERS = ("ema.decay",)
"""Free where both have a value: else the checkpoint has no average, or an unused one."""

_BOUND_KEYS = ("run.seed",)
"""Below a free node, but a position in the data means nothing under another seed."""

_DATA_KEYS = ("train.global_batch_size",)
"""Freed, beside the node `data`, by `data.on_change=restart`."""

ABSENT = "(absent)"
"""The value of a key that one of two configs lacks."""


@dataclass(frozen=True)
class Difference:
    """One setting, by its dotted key, whose value in the run's saved config differs from the one asked for."""

    key: str
    old: Any
    new: Any

    @property
    def is_free(self) -> bool:
        """Whether a run may continue with the new value."""
        node = self.key.split(".", 1)[0]
        if self.key in _FREE_NUMBERS:
            return not {None, ABSENT} & {self.old, self.new}
        return self.key not in _BOUND_KEYS and (node in _FREE_NODES or self.key in _FREE_KEYS)

    @property
    def is_of_data(self) -> bool:
        """Whether the setting determines which samples come, or how many at once."""
        return self.key.startswith("data.") or self.key in _DATA_KEYS


def find_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Compare two nested configs, key by key in alphabetical order; lists are compared as a whole."""
    before, after = flatten(old), flatten(new)
    pairs = [(key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in sorted(before.keys() | after.keys())]
    return [Difference(*pair) for pair in pairs if pair[1] != pair[2]]


def refused(
    differences: Sequence[Difference], *, free_keys: Collection[str] = (), data_may_change: bool = False
) -> list[Difference]:
    """Differences that a continued run may not have; `data_may_change` frees data and batch size too."""
    free = [f"{key}." for key in free_keys]  # a node of free options may replace null, and be replaced by it

    def is_bound(key: str) -> bool:
        return not any(key.startswith(name) or name.startswith(key) for name in free)

    bound = [difference for difference in differences if not difference.is_free and is_bound(f"{difference.key}.")]
    return [difference for difference in bound if not (data_may_change and difference.is_of_data)]


def describe(differences: Sequence[Difference]) -> str:
    """One line `key: old -> new` for each; of another component, not the options that one side lacks.

    Of lists it names the first entry that differs.
    """
    nodes = [
        difference.key.removesuffix("_target_") for difference in differences if difference.key.endswith("._target_")
    ]
    shown = [
        difference
        for difference in differences
        if ABSENT not in (difference.old, difference.new)
        or not any(difference.key.startswith(node) and difference.key != f"{node}_target_" for node in nodes)
    ]
    return "\n".join(f"  {_describe(difference)}" for difference in shown)


def _describe(difference: Difference) -> str:
    key, old, new = difference.key.removesuffix("._target_"), difference.old, difference.new
    if isinstance(old, list) and isinstance(new, list):
        pairs = enumerate(zip_longest(old, new, fillvalue=ABSENT))
        place, (old, new) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        key = f"{key}[{place}]"
    return f"{key}: {old} -> {new}"


_LIMITS = ("train.max_steps", "train.max_epochs", "data.num_examples_to_see")


def limits_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that say how long a run trains, by their dotted keys; None = no limit."""
    flat = flatten(config)
    return {key: flat.get(key) for key in _LIMITS}


def is_limit_raised(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the new limits train longer: more steps, epochs or samples to see, or a limit lifted."""
    pairs = [(old.get(key), new.get(key)) for key in _LIMITS]
    return any(before is not None and (after is None or after > before) for before, after in pairs)


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of a nested config by their dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
