"""The numbers of an evaluation, in its folder, the run's `evaluation.jsonl` and tracker."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from cascade_train.config.saved import CONFIG_NAME, load_yaml
from cascade_train.engine.checkpoint.folder import EVALUATED, EVALUATIONS, CheckpointFolder
from cascade_train.engine.sampling import compose_grid
from cascade_train.engine.tracking import build_tracker
from cascade_train.errors import ConfigError
from cascade_train.files.durable import append_durably, write_durably
from cascade_train.files.untrusted import read_lines, read_mapping
from cascade_train.results.evaluation.pictures import Folder

log = logging.getLogger(__name__)

METRICS, GRID = "metrics.json", "grid.png"

ROWS, COLUMNS = 12, 8
"""Of the grid at most: prompts, the first ones, and pictures of each."""

SETS = ("fid", "kid", "kid_std", "precision", "recall", "rfid")
"""Measures of sets, by a network's features."""

ENOUGH = 10_000
"""Pictures on each side from which on the bias of FID is small (Heusel et al. 2017)."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        origin: the argument that named the model.
        images: how many pictures were measured.
        real: name of the pictures that they were compared with; None = with none.
        real_images: how many those are.
        networks: the ones that measured, as given: features, resize, clip, lpips.
        settings: what pictures and numbers depend on beside the networks, as JSON values.
        weights: stamp of the checkpoint that they are of, or "other".
        captions: of the pictures.
        count: pictures of each prompt, one behind the other.
        originals: reads the pictures, (3, H, W) uint8, that those of some numbers follow; None = they follow none.
        measures: the numbers by name.
    """

    origin: str
    images: int
    real: str | None
    real_images: int
    networks: Mapping[str, str | None]
    settings: Mapping[str, Any]
    weights: str
    captions: tuple[str, ...]
    count: int
    originals: Callable[[tuple[int, ...]], list[Tensor]] | None
    measures: Mapping[str, float] = field(default_factory=dict)

    def is_in(self, folder: Path) -> bool:
        """Whether the numbers of an evaluation by the same settings and networks are in a folder."""
        there = read_mapping(folder / METRICS)
        return all(there.get(key) == value for key, value in self.plain().items() if key in ("settings", "networks"))

    def plain(self) -> dict[str, Any]:
        """JSON values of all but single pictures; a number that is not finite is null."""
        finite = {name: value if math.isfinite(value) else None for name, value in self.measures.items()}
        keys = ("origin", "images", "real", "real_images", "networks", "settings", "weights", "caution")
        return {**{key: getattr(self, key) for key in keys}, "measures": finite}

    def table(self) -> str:
        """The numbers as lines, each with what it is of."""
        lines = [f"{name:<12} {value:10.4f}   {self._meaning(name)}" for name, value in self.measures.items()]
        cautions = [] if self.caution is None else [self.caution]
        return "\n".join([f"{self.images} images of {self.origin}", *lines, *cautions])

    @property
    def caution(self) -> str | None:
        """What to mind in reading the numbers; None = nothing."""
        name = next((name for name in self.measures if name in ("fid", "rfid")), None)
        if name is None or min(self.images, self.real_images) >= ENOUGH:
            return None
        return (
            f"{name} of {self.images:,} images against {self.real_images:,} real ones is too large, the more so the "
            f"fewer they are (bias of FID): compare it with equal numbers alone. {ENOUGH:,} of each are usual."
        )

    def _meaning(self, name: str) -> str:
        if name == "clip_score":
            return f"images and their captions, by {self.networks['clip']}"
        against = f"against {self.real_images} of {self.real}"
        if name not in SETS:
            return f"each {against}"
        resize = "" if str(self.networks["features"]).startswith("package:") else f", resize={self.networks['resize']}"
        return f"{against}, by {self.networks['features']}{resize}"

    def write(self, folder: Path) -> None:
        """Write `metrics.json` and `grid.png` into the folder that holds the pictures."""
        firsts = range(0, self.images, self.count)[:ROWS]
        compose_grid([self.captions[number] for number in firsts], self._columns(folder, firsts)).save(folder / GRID)
        write_durably(folder / METRICS, json.dumps(self.plain(), indent=2) + "\n")

    def _columns(self, folder: Path, firsts: range) -> dict[str, list[Image.Image]]:
        """Columns of the grid: the original, where there is one, and the pictures of a prompt."""
        read, columns = Folder(folder).read, dict[str, list[Image.Image]]()
        if self.originals is not None:
            columns["original"] = [to_pil_image(self.originals((number,))[0]) for number in firsts]
        for place in range(min(self.count, COLUMNS)):
            title = "image" if self.count == 1 else f"image {place + 1}"
            columns[title] = [to_pil_image(read(number + place)) for number in firsts]
        return columns


def publish(
    result: Evaluation, folder: Path, *, run: Path | None, step: int | None, track: bool, is_main: bool
) -> None:
    """Write the numbers into the folder, print them, and `keep` them. Collective."""
    if is_main:
        result.write(folder)
        sys.stdout.write(f"{result.table()}\n{folder}\n")
        sys.stdout.flush()
    if run is not None and step is not None:
        keep(result, run, step, folder / GRID, track=track, is_main=is_main)


def keep(result: Evaluation, run: Path, step: int, grid: Path, *, track: bool, is_main: bool) -> None:
    """Add the numbers to a run's `evaluation.jsonl` and, with `track`, its tracker. Collective."""
    plain = {key: value for key, value in result.plain().items() if key != "settings"}
    numbers = {f"{EVALUATED}{name}": value for name, value in plain.pop("measures").items()}
    if is_main:
        path = run / EVALUATIONS
        last = deque(read_lines(path), maxlen=1)
        is_torn = bool(last) and not last[0].endswith(b"\n")  # by a crash
        append_durably(path, "\n" * is_torn + json.dumps({"step": step, **numbers, **plain}) + "\n")
    if not track:
        return
    cfg: Any = OmegaConf.to_container(load_yaml(run / CONFIG_NAME))
    if cfg["tracker"]["name"] == "none":
        return
    newest = list(CheckpointFolder(run / "checkpoints").complete().values())[-1:]
    try:
        tracker = build_tracker(
            **{key: cfg["tracker"][key] for key in ("name", "project", "entity", "mode")},
            run_name=cfg["run"]["name"],
            directory=run.absolute(),
            run_id=newest[0].facts["tracker_run_id"] if newest else None,
            config=cfg,
            beside=True,
        )
    except ConfigError as error:
        log.warning("The numbers are in %s, and not in the tracker: %s", run / EVALUATIONS, error)
        return
    tracker.log(numbers, step)
    tracker.log_image("evaluation", grid, step)
    tracker.finish()
