"""Pictures of any shape, one at a time: Stage A, Stage B and the previewer take them, or say which sides they need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cascade_train.__main__ import launch
from cascade_train.batch import Batch
from cascade_train.engine.loop import Trainer
from tests.distributed.test_modes import B_NARROW
from tests.integration.runs import SMALL, once, read_metrics, train
from tests.integration.test_previewer import ORIGINAL, SCRATCH
from tests.integration.test_stage_a import NARROW as A_NARROW
from tests.unit.data import tars

pytestmark = pytest.mark.slow

SIZES = {"square": (33, 33), "wide": (70, 33), "tall": (33, 70)}
"""Width and height of pictures in files, of which none divides by 32."""

STAGES = {
    "a": ("model=a_tiny", "objective.adversarial.start_step=1", "objective.adversarial.channels=8"),
    "b": ("model=b_tiny", *B_NARROW, "model.shrink_range=[0.5,1.0]", "noise@objective.noise=pyramid", "sample.steps=2"),
    "previewer": ("model=c_tiny", "objective=preview", ORIGINAL, SCRATCH),
}
BUCKETS = {(64, 64), (32, 64), (64, 32)}
"""Sizes that they are trained at."""

SHRUNK = {"a": 1, "b": 1, "previewer": 4}
"""Pixels of a picture for each pixel of what is shown."""

KIND = {"a": "reconstruction", "b": "sample", "previewer": "preview"}


def overrides(name: str) -> tuple[str, ...]:
    """Return the smallest network of a stage, at 64 px."""
    narrow = tuple(f"model.{each}" for each in A_NARROW) if name == "a" else ()
    return ("task=reconstruction", *STAGES[name], *narrow, "model.image_size=64")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Pictures of three shapes in a tar, in buckets of 64 x 64, 32 x 64 and 64 x 32 pixels."""
    files = []
    for key in range(12):
        size = list(SIZES.values())[key % 3]
        files += [(f"{key:02d}.png", tars.picture(*size, tint=20 * key)), (f"{key:02d}.txt", b"colours")]
    tar = tars.write(tmp_path_factory.mktemp("sizes") / "a.tar", files)
    return ("data=webdataset", f"data.urls={tar}", "data.aspect_ratios=[1/1,1/2]", "data.num_workers=0")


@pytest.mark.parametrize("name", STAGES)
def test_pictures_of_every_shape_train_one_at_a_time(
    name: str, data: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[int, ...]] = []
    step = Trainer.train_step

    def noted(trainer: Trainer, batches: Sequence[Batch]) -> dict[str, Any]:
        trained.extend(tuple(batch.image_BCHW.shape) for batch in batches)
        return step(trainer, batches)

    monkeypatch.setattr(Trainer, "train_step", noted)
    looks = ("validate.every_steps=6", "validate.share=0.25", "validate.samples=3", "sample.every_steps=6")
    alone = ("train.global_batch_size=1", "train.max_steps=6", "sample.count=1", "checkpoint.every_steps=null")
    again = ("validate.reconstructions=3", "validate.logsnr=[0]") if name == "b" else ()
    run = train(tmp_path / "run", *overrides(name), *data, *looks, *alone, *again)
    assert {shape[2:] for shape in trained} == BUCKETS
    assert all(shape[0] == 1 for shape in trained)
    rows = read_metrics(run)
    assert len(rows) == 6
    assert all(row["grad_norm"] > 0 for row in rows)
    assert {"validate/psnr", "validate/ssim"} <= rows[-1].keys()
    with Image.open(run / "samples" / "step_6" / f"00_{KIND[name]}.png") as picture:
        assert (picture.height * SHRUNK[name], picture.width * SHRUNK[name]) in BUCKETS


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("key", ["model.image_size", "data.buckets.multiple_px"])
def test_sides_that_do_not_divide_are_refused_with_the_rule(
    name: str, key: str, data: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, multiple = tmp_path / "run", 4 if name == "a" else 32
    assert launch(once(*SMALL, *overrides(name), *data, f"{key}=33", f"run.dir={run}")) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert f"must be a multiple of {multiple} pixels" in said or f"the model needs multiples of {multiple}: " in said
    assert key in said
    assert not run.exists()
