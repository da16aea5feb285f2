"""A new member is one source file and one YAML, a family one folder, and no file of the library changes.

Each of `members/` is laid over the package, as if it lay in its folders, and trains two steps from the command line.
"""

from __future__ import annotations

import importlib
import io
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

import cascade_train
from cascade_train.__main__ import launch
from tests.integration.runs import exported_weights, read_metrics

MEMBERS = Path(__file__).parent / "members"
SMALL = ("train.global_batch_size=4", "train.max_steps=2", "sample.every_steps=null", "checkpoint.every_steps=null")
Train = Callable[..., Path]


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Train]:
    """Train with one more file of source and one more of configuration; return the run's folder."""
    package, conf = tmp_path / "cascade_train", tmp_path / "conf"
    places: list[tuple[list[str], str]] = []
    before = set(sys.modules)

    def train(source: str, option: str, *overrides: str) -> Path:
        for path in (f"cascade_train/{source}", f"conf/{option}"):
            (tmp_path / path).parent.mkdir(parents=True)
            shutil.copy(MEMBERS / path, tmp_path / path)
        room = source.partition("/")[0]
        for name, folder in (("cascade_train", package), (f"cascade_train.{room}", package / room)):
            paths = importlib.import_module(name).__path__
            paths.append(str(folder))
            places.append((paths, str(folder)))
        run = tmp_path / "run"
        assert launch(["--config-dir", str(conf), *SMALL, f"run.dir={run}", *overrides]) == 0
        return run

    yield train
    for paths, folder in places:
        paths.remove(folder)
    for name in set(sys.modules) - before:
        if str(package) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def trained_two_steps(run: Path) -> bool:
    rows = [row for row in read_metrics(run) if "grad_norm" in row]
    return [row["step"] for row in rows] == [1, 2] and all(row["grad_norm"] > 0 for row in rows)


def test_each_member_is_one_source_file_and_one_yaml() -> None:
    sources = list(MEMBERS.glob("cascade_train/*/*.py"))
    family = [path for path in MEMBERS.glob("cascade_train/models/*/*") if path.suffix]
    assert len(sources) == 5
    assert len({path.parent for path in family}) == 1
    of_family = {*family, MEMBERS / "conf/model/flow_tiny.yaml"}
    assert len({path for path in MEMBERS.rglob("*.*") if path.suffix != ".pyc"} - of_family) == 2 * len(sources)
    sources += family
    assert not any((Path(cascade_train.__file__).parents[1] / path.relative_to(MEMBERS)).exists() for path in sources)


def test_a_task(trained: Train) -> None:
    run = trained("tasks/biases.py", "task/biases.yaml", "task=biases", "model=c_tiny", "optimizer.lr=1e-2")
    assert trained_two_steps(run)
    found = exported_weights(run)
    first = load_file(
        Path(cascade_train.__file__).parent / "models/tiny_weights/prior/diffusion_pytorch_model.safetensors"
    )
    moved = {name for name, value in found.items() if not value.float().equal(first[name].float())}
    assert moved
    assert all(name.endswith("bias") for name in moved)


def test_a_dataset(trained: Train, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pictures.zip", "w") as archive:
        for number in range(8):
            picture = io.BytesIO()
            Image.fromarray(np.full((100, 120, 3), 20 * number, dtype=np.uint8)).save(picture, "PNG")
            archive.writestr(f"{number}.png", picture.getvalue())
            archive.writestr(f"{number}.txt", f"number {number}")
    chosen = ("data=zipped", f"data.path={tmp_path / 'pictures.zip'}", "data.num_workers=0")
    run = trained("data/zipped.py", "data/zipped.yaml", "task=finetune", "model=c_tiny", *chosen)
    assert trained_two_steps(run)


def test_a_stage(trained: Train) -> None:
    run = trained("models/grey_stage.py", "model/grey_tiny.yaml", "task=finetune", "model=grey_tiny")
    assert trained_two_steps(run)
    assert (run / "export" / "prior" / "model_index.json").is_file()


def test_a_control_filter(trained: Train) -> None:
    chosen = ("filter=threshold", "task.filter.level=100", "task.bottleneck=small", "optimizer.lr=3e-3")
    run = trained("filters/threshold.py", "filter/threshold.yaml", "task=controlnet", "model=c_tiny", *chosen)
    assert trained_two_steps(run)


def test_an_optimizer(trained: Train) -> None:
    run = trained("engine/lion.py", "optimizer/lion.yaml", "task=finetune", "model=c_tiny", "optimizer=lion")
    assert trained_two_steps(run)
