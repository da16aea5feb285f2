"""Stage A and a previewer on several ranks: losses, the adaptive weight, the opponent and codes are those of one."""

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_modes import fork
from tests.integration.runs import read_metrics
from tests.integration.test_autoencoder_kl import VAE
from tests.integration.test_autoencoder_kl import WEIGHTS as VAE_WEIGHTS
from tests.integration.test_previewer import ORIGINAL, PREVIEW, SCRATCH
from tests.integration.test_previewer import WEIGHTS as PREVIEWER_WEIGHTS
from tests.integration.test_stage_a import STAGE_A, WEIGHTS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SHORT = ("train.max_steps=3", "checkpoint.every_steps=null")
ONE = (*STAGE_A, *SHORT, "objective.adversarial.start_step=2", "activation_checkpointing=true")
PREVIEWER = (*PREVIEW, ORIGINAL, SCRATCH, *SHORT, "validate.every_steps=3", "validate.samples=3")
KL = (*VAE, "train.max_steps=3", "objective.adversarial.start_step=2", "activation_checkpointing=true")
RUNS = {
    "one": (1, None, ONE),
    "shards": (2, None, (*ONE, "parallel=fsdp", "train.micro_batch_size=1")),
    "decoder": (2, None, (*ONE, "parallel=fsdp", "objective.train_encoder=false")),
    "vae": (1, None, KL),
    "vae_in_shards": (2, None, (*KL, "parallel=fsdp", "train.micro_batch_size=1")),
    "vae_decoder": (2, None, (*KL, "parallel=fsdp", "objective.train_encoder=false")),
    "previewer": (1, None, PREVIEWER),
    "previewer_in_shards": (2, None, (*PREVIEWER, "parallel=fsdp", "train.micro_batch_size=1")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return fork(tmp_path_factory.mktemp("autoencoding"), RUNS)


def test_every_measure_is_that_of_one_rank(runs):
    whole = read_metrics(runs / "one")
    assert "adaptive_weight" in whole[-1]
    for one, several in zip(whole, read_metrics(runs / "shards"), strict=True):
        assert one == pytest.approx(several, rel=2e-3, abs=1e-6)


def test_an_autoencoder_of_stable_diffusion_in_shards_is_that_of_one_rank(runs):
    whole = read_metrics(runs / "vae")
    assert "adaptive_weight" in whole[-1]
    for one, several in zip(whole, read_metrics(runs / "vae_in_shards"), strict=True):
        assert one == pytest.approx(several, rel=2e-3, abs=1e-6)
    one, several, decoder = (load_file(runs / each / VAE_WEIGHTS) for each in ("vae", "vae_in_shards", "vae_decoder"))
    assert one.keys() == several.keys() == decoder.keys()
    assert all(torch.allclose(value, several[name], rtol=2e-3, atol=2e-3) for name, value in one.items())
    assert not torch.equal(one["encoder.conv_in.weight"], decoder["encoder.conv_in.weight"])


def test_a_previewer_in_shards_is_that_of_one_rank(runs):
    for one, two in zip(*(read_metrics(runs / name) for name in ("previewer", "previewer_in_shards")), strict=True):
        assert one == pytest.approx(two, rel=2e-3, abs=1e-6)
    one, two = (load_file(runs / name / PREVIEWER_WEIGHTS) for name in ("previewer", "previewer_in_shards"))
    assert one.keys() == two.keys()
    assert all(torch.allclose(value, two[name], rtol=2e-3, atol=2e-3) for name, value in one.items())


def test_the_same_codes_are_revived(runs):
    one, several = (load_file(runs / each / WEIGHTS)["vquantizer.embedding.weight"] for each in ("one", "shards"))
    torch.testing.assert_close(one, several, rtol=2e-3, atol=2e-3)


def test_a_frozen_encoder_is_exported_as_it_was(runs):
    one, decoder = (load_file(runs / each / WEIGHTS) for each in ("one", "decoder"))
    assert one.keys() == decoder.keys()
    assert decoder["down_blocks.0.gammas"].count_nonzero() == 0
    assert one["down_blocks.0.gammas"].count_nonzero() > 0
