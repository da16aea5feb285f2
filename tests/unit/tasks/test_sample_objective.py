"""A new objective of pictures is one class with its task and one YAML: two steps of it, with no file of the library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.tasks.base import Export, Phase, StepOutput, Task, weighted
from cascade_train.tasks.pictures import PictureObjective, PictureTask, PreparedPictures
from tests.integration.runs import read_metrics, train
from tests.unit.config.composing import checked

YAML = f"""# Stage A's decoder, by pixels alone.
# python -m cascade_train --config-dir my_conf task=reconstruction model=a_tiny objective=sample
_target_: {__name__}.Pixels
pixel: l2
"""
CHOSEN = ("task=reconstruction", "model=a_tiny", "objective=sample", "run.allowed_packages=[cascade_train,torch,tests]")


class Pixels(PictureObjective):
    """Scores reconstructions by their pixels alone."""

    fits = ("stage_a",)

    def task(self, reconstruction: Any) -> Task:
        return DecoderTraining(self)


class DecoderTraining(PictureTask):
    """Trains Stage A's decoder."""

    fits = ("stage_a",)
    trains_network = True

    def __init__(self, objective: Pixels) -> None:
        self.objective = objective

    def attach(self, stage: Any, objective: Any, device: torch.device) -> None:
        super().attach(stage, objective, device)
        stage.network.requires_grad_(False)
        for module in stage.network.decoder_modules():
            module.requires_grad_(True)

    def phases(self) -> list[Phase]:
        network, units = {"network": self.stage.network}, {"network": self.stage.units()}
        return [Phase(name="train", modules=network, units=units, loss=self.loss)]

    def loss(self, prepared: PreparedPictures) -> StepOutput:
        loss_B = self._distance(prepared)
        return StepOutput(loss_B=weighted(loss_B, prepared.weight_B), report={"loss_raw": loss_B.detach()})

    @torch.no_grad()
    def measures(self, prepared: PreparedPictures, logsnr: Sequence[float]) -> Mapping[str, Tensor]:
        return {"loss": self._distance(prepared)}

    def _distance(self, prepared: PreparedPictures) -> Tensor:
        made_BCHW = self.stage.network(prepared.image_BCHW).image_BCHW
        return self.objective.pixels(made_BCHW, prepared.image_BCHW, prepared.mask_B1HW)

    def exports(self) -> Mapping[str, Export]:
        return {"sample": Export(module=self.stage.network, write=_write)}


def _write(state: Mapping[str, Tensor], directory: Path) -> float:
    directory.mkdir(parents=True)
    save_file(dict(state), directory / "model.safetensors")
    return 0.0


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A folder of the user's own with the one YAML."""
    file = tmp_path / "conf" / "objective" / "sample.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(YAML)
    return tmp_path / "conf"


def test_it_trains_is_measured_shown_and_exported(conf: Path, tmp_path: Path) -> None:
    looks = ("sample.every_steps=2", "sample.count=1", "validate.every_steps=2", "validate.samples=4")
    short = ("train.max_steps=2", "train.global_batch_size=4", "model.image_size=64", "validate.share=0.05")
    run = train(tmp_path / "run", *CHOSEN, *looks, *short, "--config-dir", str(conf))
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert rows[-1]["validate/loss"] > 0
    assert {path.name for path in (run / "samples" / "step_2").iterdir()} == {"grid.png", "00_reconstruction.png"}
    assert load_file(run / "export" / "sample" / "model.safetensors")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("model=b_tiny", r"the objective .*Pixels does not train model=b_tiny \(stage_b\) but a or a_tiny\."),
        ("task=finetune", "trains text_to_image, but model=a_tiny is stage_a"),
    ],
)
def test_another_stage_or_task_is_refused_before_anything_is_loaded(conf: Path, changed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(*CHOSEN, changed, extra=conf)


def test_options_that_mean_nothing_under_it_are_refused(conf: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit code 2"):
        train(tmp_path / "run", *CHOSEN, "task.train_compressor=true", "--config-dir", str(conf))
