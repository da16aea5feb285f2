"""The unweighted loss by noise level: gathered at every step on the device, drawn beside the sample grids.

What a run measured as numbers lives in metrics.py.

Shape legend: G samples of the global batch, N levels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from cascade_train.engine.chart import Line, draw_chart
from cascade_train.errors import unwritten

log = logging.getLogger(__name__)

FILE_NAME = "loss_by_logsnr.png"
LOWEST, HIGHEST, LEVELS = -16.0, 16.0, 64
"""Range of logSNR and how many levels it is cut into; what lies outside counts for the level at its end."""

_NOW, _BEFORE = "#2040a0", "#b0b0b0"


class LossPlot:
    """Mean loss of each noise level since the last drawing; of fixed size, whatever the length of a run."""

    def __init__(self, *, directory: Path, device: torch.device, is_main: bool) -> None:
        """Store.

        Args:
            directory: where `step_<n>/` folders go.
            device: where losses are gathered.
            is_main: whether this rank draws.
        """
        self._directory = directory
        self._is_main = is_main
        self._sums_2N = torch.zeros(2, LEVELS, device=device)
        self._levels_N = torch.arange(LEVELS, device=device)
        self._before: list[tuple[float, float]] = []

    def add(self, logsnr_G: Tensor, loss_raw_G: Tensor) -> None:
        """Take in the samples of an optimizer step, (G,) each. Does not sync with the host."""
        position_G = (logsnr_G.float() - LOWEST) / (HIGHEST - LOWEST) * LEVELS
        level_G = position_G.clamp(0, LEVELS - 1).long()
        is_level_GN = (level_G[:, None] == self._levels_N).float()
        self._sums_2N += torch.stack([loss_raw_G.float() @ is_level_GN, is_level_GN.sum(dim=0)])

    def forget(self) -> None:
        """Drop what came in since the last drawing: its steps are undone."""
        self._sums_2N.zero_()

    def draw(self, step: int) -> list[Path]:
        """Draw what came in since the last call, and what came before it in grey; start over.

        Returns:
            The file written; none on other ranks than 0, and where nothing came in.
        """
        losses, counts = self._sums_2N.tolist()
        self._sums_2N.zero_()
        points = [
            (LOWEST + (level + 0.5) * (HIGHEST - LOWEST) / LEVELS, loss / count)
            for level, (loss, count) in enumerate(zip(losses, counts, strict=True))
            if count
        ]
        before, self._before = self._before, points
        if not self._is_main or not points:
            return []
        file = self._directory / f"step_{step}" / FILE_NAME
        try:
            self._directory.mkdir(exist_ok=True)  # and no run directory that was removed
            file.parent.mkdir(exist_ok=True)
            draw_losses(points, before).save(file)
        except OSError as error:
            file.unlink(missing_ok=True)
            log.warning("%s. The run goes on without this plot.", unwritten(file, error))
            return []
        return [file]


def draw_losses(points: Sequence[tuple[float, float]], before: Sequence[tuple[float, float]]) -> Image.Image:
    """Return a picture of (logSNR, loss) points, the earlier ones in grey."""
    lines = [
        Line(label="since the last plot", colour=_NOW, points=points, dotted=True),
        Line(label="before it", colour=_BEFORE, points=before, dotted=True),
    ]
    return draw_chart("unweighted loss over logSNR (left: noise, right: data)", lines, x_format=".1f")
