"""Stage A on several ranks: losses, the adaptive weight, the opponent and the revived codes are those of one."""

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_modes import fork
from tests.integration.runs import read_metrics
from tests.integration.test_stage_a import STAGE_A, WEIGHTS

pytestmark = pytest.mark.distributed

SHORT = ("train.max_steps=3", "checkpoint.every_steps=null")
ONE = (*STAGE_A, *SHORT, "objective.adversarial.start_step=2", "activation_checkpointing=true")
RUNS = {
    "one": (1, None, ONE),
    "shards": (2, None, (*ONE, "parallel=fsdp", "train.micro_batch_size=1")),
    "decoder": (2, None, (*ONE, "parallel=fsdp", "objective.train_encoder=false")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return fork(tmp_path_factory.mktemp("autoencoding"), RUNS)


def test_every_measure_is_that_of_one_rank(runs):
    whole = read_metrics(runs / "one")
    assert "adaptive_weight" in whole[-1]
    for one, several in zip(whole, read_metrics(runs / "shards"), strict=True):
        assert one == pytest.approx(several, rel=2e-3, abs=1e-6)


def test_the_same_codes_are_revived(runs):
    one, several = (load_file(runs / each / WEIGHTS)["vquantizer.embedding.weight"] for each in ("one", "shards"))
    torch.testing.assert_close(one, several, rtol=2e-3, atol=2e-3)


def test_a_frozen_encoder_is_exported_as_it_was(runs):
    one, decoder = (load_file(runs / each / WEIGHTS) for each in ("one", "decoder"))
    assert one.keys() == decoder.keys()
    assert decoder["down_blocks.0.gammas"].count_nonzero() == 0
    assert one["down_blocks.0.gammas"].count_nonzero() > 0
