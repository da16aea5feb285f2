"""How FSDP2's shards cross between ranks on a CPU."""

import pytest
import torch

from tests.distributed.gloo_hooks import NUMBERS, draws
from tests.distributed.test_modes import fork

pytestmark = pytest.mark.distributed

RANKS = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of three ranks found."""
    folder = fork(tmp_path_factory.mktemp("gloo"), {"three": (RANKS, "gloo_hooks.exchange", None)})
    return [torch.load(folder / "three_notes" / f"exchanged_{rank}") for rank in range(RANKS)]


@pytest.mark.slow
def test_every_rank_gathers_all_shards_in_the_order_of_ranks(found):
    whole = torch.cat([draws(rank, NUMBERS) for rank in range(RANKS)])
    for each in found:
        assert torch.equal(each["gathered"], whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_a_shard_that_lies_in_the_output_is_gathered_there(found, dtype):
    whole = torch.arange(RANKS).to(dtype)[:, None].expand(RANKS, NUMBERS)
    for each in found:
        assert torch.equal(each[f"in place, {dtype}"], whole)


@pytest.mark.parametrize(("op", "divisor"), [("SUM", 1), ("AVG", RANKS)])
def test_every_rank_keeps_its_part_of_the_sum_or_mean_added_in_the_order_of_ranks(found, op, divisor):
    first, second, third = (draws(rank, RANKS * NUMBERS).view(RANKS, -1) for rank in range(RANKS))
    for each, shard in zip(found, (first + second + third) / divisor, strict=True):
        assert torch.equal(each[op], shard)


def test_other_reductions_are_refused(found):
    assert [each["MAX"] for each in found] == ["refused"] * RANKS
