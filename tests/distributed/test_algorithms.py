"""Every optimizer on two ranks, whole and on shards, and moved from one to the other."""

import pytest
import torch

from cascade_train.distributed.parallelize import local
from cascade_train.distributed.process_group import build_mesh, process_group
from tests.distributed.algorithm_hooks import ROUNDED, new, rounded
from tests.distributed.test_modes import fork
from tests.unit.engine.algorithms import NEED_WHOLE, OPTIONS, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Where two ranks ended."""
    folder = fork(tmp_path_factory.mktemp("algorithms"), {"two": (2, "algorithm_hooks.train_every_option", None)})
    return torch.load(folder / "two_notes" / "found.pt")


@pytest.mark.parametrize("option", OPTIONS)
def test_two_ranks_end_where_one_does_in_every_mode_and_move(found, option):
    """To the bit where a run continues as it was; the whole run within what the order of sums changes."""
    with process_group() as world:
        phase = new(option, build_mesh(world, (1, 1)))
        train(phase, range(1, 6))
    alone = {name: local(p.detach()) for name, p in phase.parameters.items()}
    ends = {key: each for key, each in found.items() if key.split()[0] == option}
    assert len(ends) == (2 if option in NEED_WHOLE else 6)
    for key, each in ends.items():
        if " to " in key:
            ranks, each = each  # noqa: PLW2901
            assert ranks == [(True, True)] * 2, key
        for name, value in alone.items():
            torch.testing.assert_close(each[name], value, rtol=1e-3, atol=2e-4, msg=f"{key} {name}")


@pytest.mark.parametrize("option", ROUNDED)
def test_weights_in_bf16_are_rounded_alike_in_every_mode(found, option):
    """Nearly every weight to the bit: gradients differ in their last bits, which seldom moves a weight."""
    with process_group() as world:
        phase = rounded(option, build_mesh(world, (1, 1)))
        train(phase, range(1, 6))
    alone = {name: local(p.detach()) for name, p in phase.parameters.items()}
    ends = {key: each for key, each in found.items() if key.startswith(f"rounded {option} ")}
    assert len(ends) == (2 if option in NEED_WHOLE else 6)
    for key, end in ends.items():
        ranks, each = end if " to " in key else ([(True, True)] * 2, end)
        assert ranks == [(True, True)] * 2, key
        for other, least in ((ends[f"rounded {option} ddp"], 0.99), (alone, 0.5)):
            one, two = (torch.cat([values[name].flatten() for name in alone]).float() for values in (each, other))
            assert (one == two).float().mean() > least, key
            assert (one - two).norm() < 0.05 * one.norm()
