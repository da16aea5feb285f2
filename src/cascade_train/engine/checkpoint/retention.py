"""Which checkpoints stay, and why. A rule alone: it deletes nothing and needs no torch."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cascade_train.engine.checkpoint.manifest import Manifest
from cascade_train.errors import ConfigError

BEST = "best"
"""The fact of a manifest that holds what its checkpoint is ranked by: {metric, value, step}."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What keeps a checkpoint; without any argument, all stay.

    Attributes:
        keep_last: how many of the newest; None = all.
        keep_every_steps: also those whose step is a multiple of this; None = no others.
        keep_best: also so many with the best `best_metric`; None = no others.
        best_metric: a key of `metrics.jsonl`.
        best_mode: whether small or large values are good.
        keep_optimizer: false = those that only stay for other reasons than being new lose their optimizer state.
    """

    keep_last: int | None = None
    keep_every_steps: int | None = None
    keep_best: int | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"
    keep_optimizer: bool = True

    def __post_init__(self) -> None:
        for key in ("keep_last", "keep_every_steps", "keep_best"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"checkpoint.{key}={value} must be at least 1, or null to switch it off")

    def reasons(self, manifests: Mapping[int, Manifest]) -> dict[int, list[str]]:
        """Return why each checkpoint stays; those without a reason may go.

        Args:
            manifests: of all that are complete, by step.
        """
        found: dict[int, list[str]] = {step: [] for step in sorted(manifests)}
        for step in self.newest(manifests):
            found[step].append("all stay" if self.keep_last is None else f"newest {self.keep_last}")
        if self.keep_every_steps is not None:
            for step in (step for step in found if step % self.keep_every_steps == 0):
                found[step].append(f"every {self.keep_every_steps}")
        for place, step in enumerate(self._best(manifests), start=1):
            found[step].append(f"number {place} by {self.best_metric}")
        for step, manifest in manifests.items():
            if manifest.name is not None:
                found[step].append(f"named {manifest.name}")
        return found

    def newest(self, manifests: Mapping[int, Manifest]) -> list[int]:
        """Return the steps of those that stay for being new: a run continues from these."""
        steps = sorted(manifests)
        return steps if self.keep_last is None else steps[-self.keep_last :]

    def _best(self, manifests: Mapping[int, Manifest]) -> list[int]:
        """Return the best steps, the best one first; of equals the later one."""
        values = {step: best_value(manifest, self.best_metric) for step, manifest in manifests.items()}
        sign = 1 if self.best_mode == "min" else -1
        ranked = sorted((sign * value, -step) for step, value in values.items() if value is not None)
        return [-step for _, step in ranked[: self.keep_best or 0]]


def best_value(manifest: Manifest, metric: str | None) -> float | None:
    """Return the metric's value that a checkpoint was saved with; None where it has none of this metric."""
    best = manifest.facts.get(BEST)
    return best["value"] if best is not None and best["metric"] == metric else None


def last_logged(path: Path, metric: str, *, step: int) -> dict[str, Any] | None:
    """Return a metric as last logged at or before a step, as {metric, value, step}; None where it never was.

    Args:
        path: `metrics.jsonl`; searched from its end.
        metric: a key of its lines.
        step: an optimizer step.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return None
    needle = f"{json.dumps(metric)}: ".encode()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = len(text)
        while (found := text.rfind(needle, 0, end)) >= 0:
            end = text.rfind(b"\n", 0, found) + 1
            row = json.loads(text[end : text.find(b"\n", found)])
            if row["step"] <= step and row.get(metric) is not None:
                return {"metric": metric, "value": row[metric], "step": row["step"]}
    return None
