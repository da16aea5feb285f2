"""Sample grids: fixed prompts, drawn with a fixed seed as training goes on.

Shape legend: B samples, C channels, H W size.
"""

from __future__ import annotations

import logging
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from cascade_train.batch import sample_seed
from cascade_train.distributed.process_group import World
from cascade_train.engine.phase import BoundPhase, averaged, evaluated
from cascade_train.errors import unwritten
from cascade_train.redaction import LONGEST_REASON, logged, shortened
from cascade_train.tasks.base import ImageSampler

log = logging.getLogger(__name__)

CELL_PX = 192
LABEL_PX = 220
LABEL_CHARACTERS, LABEL_LINES = 28, 10


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """What every grid shows: a row for each caption.

    `image_BCHW` (B, 3, H, W) float in [0, 1] are the captions' own images, on the host; None for free prompts. `seed`
    is that of the initial noise, mixed with the row's number.
    """

    captions: tuple[str, ...]
    image_BCHW: Tensor | None
    seed: int


@dataclass(kw_only=True)
class SampleGrid:
    """Draws the same prompts from the same noise each time, with the weights and with their average.

    Only the first grid in `directory` gets files of the originals.
    """

    phases: Sequence[BoundPhase]
    image_sampler: ImageSampler
    spec: SampleSpec
    world: World
    directory: Path
    has_originals: bool = field(default=False, init=False)

    def draw(self, step: int) -> list[Path]:
        """Draw the grid of `step` and return the files written on rank 0; a failure is only logged. Collective."""
        columns = self._columns()
        if not self.world.is_main:
            return []
        folder = self.directory / f"step_{step}"
        try:
            return [self._write(folder, columns)]
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            log.warning("%s. The run goes on without this grid.", unwritten(folder, error))
            return []

    def _write(self, folder: Path, columns: dict[str, list[Image.Image]]) -> Path:
        self.directory.mkdir(exist_ok=True)  # and no run directory that was removed
        folder.mkdir(exist_ok=True)
        names = [
            self.image_sampler.result,
            f"ema_{self.image_sampler.result}",
            *([] if self.has_originals else ["original"]),
        ]
        for name in names:
            for row, image in enumerate(columns.get(name, [])):
                info = PngInfo()
                info.add_text("caption", logged(shortened(self.spec.captions[row], LONGEST_REASON)))
                image.save(folder / f"{row:02d}_{name}.png", pnginfo=info)
        self.has_originals = True
        grid = folder / "grid.png"
        compose_grid(self.spec.captions, columns).save(grid)
        return grid

    def _columns(self) -> dict[str, list[Image.Image]]:
        columns: dict[str, Tensor] = {}
        with evaluated(self.phases):
            image_BCHW = self.spec.image_BCHW
            if image_BCHW is not None:
                image_BCHW = image_BCHW.to(self.world.device, non_blocking=True)
                columns["original"] = image_BCHW
                columns |= self.image_sampler.beside(self.spec.captions, image_BCHW, self._generators)
            columns[self.image_sampler.result] = self._sample(image_BCHW)
        if any(phase.ema is not None for phase in self.phases):
            with averaged(self.phases), evaluated(self.phases):
                columns[f"ema_{self.image_sampler.result}"] = self._sample(image_BCHW)
        return {title: to_images(images) for title, images in columns.items()}

    def _sample(self, image_BCHW: Tensor | None) -> Tensor:
        return self.image_sampler.sample(self.spec.captions, image_BCHW, self._generators)

    def _generators(self, purpose: str) -> list[torch.Generator]:
        rows = range(len(self.spec.captions))
        return [torch.Generator().manual_seed(sample_seed(self.spec.seed, 0, row, purpose)) for row in rows]


def to_images(image_BCHW: Tensor) -> list[Image.Image]:
    """PIL images of (B, 3, H, W) float in [0, 1]."""
    pixels = image_BCHW.mul(255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(picture) for picture in pixels]


def compose_grid(captions: Sequence[str], columns: dict[str, list[Image.Image]]) -> Image.Image:
    """One picture: a row per caption, a titled column per kind of image, captions at the left."""
    title_px = 24
    width = LABEL_PX + CELL_PX * len(columns)
    grid = Image.new("RGB", (width, title_px + CELL_PX * len(captions)), "white")
    draw = ImageDraw.Draw(grid)
    font = ImageFont.load_default(size=14)
    for column, (title, images) in enumerate(columns.items()):
        left = LABEL_PX + CELL_PX * column
        draw.text((left + 4, 4), title.replace("_", " "), fill="black", font=font)
        for row, image in enumerate(images):
            longest = max(image.size)
            width, height = (max(1, round(side * (CELL_PX - 4) / longest)) for side in image.size)
            grid.paste(image.resize((width, height)), (left, title_px + CELL_PX * row))
    for row, caption in enumerate(captions):
        label = textwrap.wrap(shortened(caption, LONGEST_REASON), LABEL_CHARACTERS)[:LABEL_LINES]
        draw.multiline_text((6, title_px + CELL_PX * row + 6), "\n".join(label), fill="black", font=font)
    return grid
