"""Classes of a user's own that are written wrong: a sentence with class, method and what is expected, or their line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from tests.integration.runs import SMALL

HEAD = """
import numpy as np, torch
from cascade_train.data.sample import RawSample
from cascade_train.data.shapes import Shapes
from cascade_train.diffusion.objective import Objective
from cascade_train.engine.lr_schedule import ConstantSchedule
from cascade_train.models.cascade.stage_c import StageC
from cascade_train.tasks.base import StepOutput
from cascade_train.tasks.finetune import Finetune

"""
GIVEN = (
    *(*SMALL, *SMALL_NETWORK, "task=finetune"),
    *("optimizer=torch", "optimizer.algorithm._target_=torch.optim.SGD"),
)
OPTIMIZER = "class Mine(torch.optim.SGD):\n    "
LOSS = "class Mine(Objective):\n    def loss(self, pred_BCHW, diffused, mask_B1HW=None): return "
ARRAY = "RawSample(image=np.zeros((8, 8, 3), dtype=np.float32), caption='', key='')"

REFUSED = {  # key, class, what is said before anything is built
    "a constructor without image_size": (
        "data",
        "class Mine(Shapes):\n    def __init__(self, seed: int): pass",
        r"data\.\w+ is unknown: mine.Mine has no such argument\. Shapes takes it: Mine.__init__ must take it too",
    ),
    "an optimizer's constructor without lr": (
        "optimizer.algorithm",
        f"{OPTIMIZER}def __init__(self, params, weight_decay=0.0): pass",
        r"optimizer.algorithm=Mine is constructed from parameter groups and lr, .*'lr'\. Write 'def __init__",
    ),
    "nothing that trains": (
        "task",
        "class Mine(Finetune):\n    def attach(self, stage, objective, device):\n"
        "        super().attach(stage, objective, device)\n        stage.network.requires_grad_(False)",
        "the task leaves no weight to train: none requires a gradient",
    ),
    "an optimizer without step": (
        "optimizer.algorithm",
        "class Mine(torch.optim.Optimizer):\n    def __init__(self, params, lr, weight_decay): pass",
        "optimizer.algorithm=Mine does not define step",
    ),
}

STOPPED = {  # key, class, what is said at the first step or while the run is built
    "scalars": (
        "objective",
        f"{LOSS}(pred_BCHW.mean(), pred_BCHW.mean())",
        r"Mine.loss must return .* loss of each sample, \(8,\) here, and returned the shapes \[\(\), \(\)\]",
    ),
    "a loss of another shape": (
        "task",
        "class Mine(Finetune):\n    def loss(self, prepared):\n"
        "        return StepOutput(loss_B=super().loss(prepared).loss_B.mean(), report={})",
        r"Mine.loss must return loss_B \(B,\), .*and returned loss_B as a Tensor of shape \(\)\.",
    ),
    "no output of a step": (
        "task",
        "class Mine(Finetune):\n    def phases(self):\n        import dataclasses\n"
        "        return [dataclasses.replace(each, loss=self.own) for each in super().phases()]\n"
        "    def own(self, prepared): return 1",
        "Mine.own must return a StepOutput, and returned a value of type int",
    ),
    "pictures of floats": (
        "data",
        f"class Mine(Shapes):\n    def read(self, row): return {ARRAY}",
        r"mine.py, line \d+, in read: RawSample.image must be .* uint8 \(H, W, 3\), and is a ndarray, float32",
    ),
    "an exception of its own in a worker": (
        "data",
        "class Mine(Shapes):\n    def read(self, row): return {}['here']",
        r"sample \S+: mine.py, line \d+, in read: KeyError: 'here'",
    ),
    "a loss of no trained weight": (
        "objective",
        "class Mine(Objective):\n    def loss(self, pred_BCHW, diffused, mask_B1HW=None):\n"
        "        return tuple(x.detach() for x in super().loss(pred_BCHW, diffused, mask_B1HW))",
        r"loss returned a loss that depends on no trained weight: remove detach",
    ),
    "a schedule that climbs": (
        "lr_scheduler",
        "class Mine(ConstantSchedule):\n    def factor(self, step, max_steps): return -1.0",
        r"Mine.factor\(1, \d+\) must be finite and at least 0, and is -1.0",
    ),
    "a schedule without a number": (
        "lr_scheduler",
        "class Mine(ConstantSchedule):\n    def factor(self, step, max_steps): return float('nan')",
        r"Mine.factor\(1, \d+\) must be finite and at least 0, and is nan",
    ),
}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(key: str, written: str) -> tuple[int, str]:
        (tmp_path / "mine.py").write_text(HEAD + written + "\n")
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        chosen = [f"{key}._target_=mine.Mine", "data.num_workers=0", "run.allowed_packages=[cascade_train,torch,mine]"]
        return launch([*GIVEN, *chosen, "run.dir=run"]), capfd.readouterr().err

    return run


@pytest.mark.parametrize(
    ("changed", "before", "after"),
    [("mine", "1.0 *", "100.0 *"), ("helpers", "SCALE = 1.0", "SCALE = 100.0"), ("base", "pass", "step = 3")],
)
def test_a_class_that_changed_since_the_run_began_is_refused_on_a_resume(
    tmp_path, monkeypatch, capfd, changed, before, after
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "base.py").write_text(f"{HEAD}class Base(Objective):\n    pass\n")
    (tmp_path / "helpers.py").write_text("SCALE = 1.0\n")
    (tmp_path / "mine.py").write_text(
        "from base import Base\nfrom helpers import SCALE\n\nclass Mine(Base):\n"
        "    def loss(self, *given):\n        return tuple(SCALE * 1.0 * loss for loss in super().loss(*given))\n"
    )
    allowed = "run.allowed_packages=[cascade_train,torch,mine]"
    command = [*GIVEN, "objective._target_=mine.Mine", "data.num_workers=0", allowed, "run.dir=run"]

    def start(steps: int) -> int:
        for name in ("mine", "base", "helpers"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return launch([*command, f"train.max_steps={steps}"])

    assert start(2) == start(3) == 0
    file = tmp_path / f"{changed}.py"
    file.write_text(file.read_text().replace(before, after))
    assert start(5) == 2
    said = capfd.readouterr().err
    assert re.search(f"mine.Mine.*files changed since this run started .*first {changed}; restore the old ones", said)


@pytest.mark.parametrize("case", REFUSED)
def test_a_class_that_cannot_train_is_refused(start, tmp_path: Path, case: str):
    key, written, words = REFUSED[case]
    code, said = start(key, written)
    assert (code, (tmp_path / "run").exists()) == (2, False), said
    assert re.search(words, said), said


@pytest.mark.parametrize("case", STOPPED)
def test_a_method_that_returns_something_else_is_named(start, case: str):
    key, written, words = STOPPED[case]
    code, said = start(key, written)
    assert code == 1
    assert re.search(words, said), said
    assert "Traceback" not in said


def test_an_exception_of_a_users_class_shows_the_users_line_first(start):
    code, said = start(
        "task", "class Mine(Finetune):\n    def prepare_batch(self, batch):\n        raise ValueError('x')"
    )
    assert code == 1
    lines = said.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("mine.py"))
    assert re.fullmatch(r"mine.py, line \d+, in prepare_batch: ValueError: x", lines[begin])
    assert lines[begin + 1].startswith("Traceback")
