"""One run that changes its ranks and its way of sharing at every start, against one that never stopped."""

import pytest
import torch

from cascade_train.engine.checkpoint.folder import find_fault, read_manifest
from tests.distributed.test_modes import NARROW, fork
from tests.integration.runs import exported_weights, read_metrics

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

BASE = (
    *("task=finetune", *NARROW, "ema.decay=0.5", "optimizer.lr=1e-3"),
    *("checkpoint.every_steps=1", "checkpoint.keep_last=null"),
)
RUNS = {
    "whole": (1, None, (*BASE, "train.max_steps=4")),
    "moved": (2, None, (*BASE, "train.max_steps=1", "parallel=fsdp")),
    "alone@moved": (1, None, (*BASE, "train.max_steps=2")),
    "four@moved": (4, None, (*BASE, "train.max_steps=3", "parallel=ddp")),
    "last@moved": (2, None, (*BASE, "train.max_steps=4", "parallel=fsdp", "checkpoint.asynchronous=false")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return fork(tmp_path_factory.mktemp("moved"), RUNS)


def test_every_start_continues_where_other_ranks_stopped(runs):
    whole, moved = read_metrics(runs / "whole"), read_metrics(runs / "moved")
    assert [row["step"] for row in moved] == [1, 2, 3, 4]
    for one, several in zip(whole, moved, strict=True):
        assert one == pytest.approx(several, rel=1e-4)
    weights = exported_weights(runs / "moved")
    for key, value in exported_weights(runs / "whole").items():
        torch.testing.assert_close(value, weights[key], rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.parametrize(("step", "ranks"), [(1, 2), (2, 1), (3, 4), (4, 2)])
def test_each_rank_writes_an_even_part_once(runs, step, ranks):
    path = runs / "moved" / "checkpoints" / f"step_{step}"
    assert find_fault(path) is None
    sizes = {name: record.size for name, record in read_manifest(path).files.items() if name.endswith(".distcp")}
    assert set(sizes) == {f"__{rank}_0.distcp" for rank in range(ranks)}
    alone = read_manifest(runs / "whole" / "checkpoints" / f"step_{step}").files["__0_0.distcp"].size
    assert sum(sizes.values()) == pytest.approx(alone, rel=0.15)
    assert max(sizes.values()) < 1.2 * min(sizes.values())
