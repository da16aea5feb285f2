"""Adapters on a frozen network in 8 bits: two ranks, with the network whole or sharded, do what one does."""

import pytest
import torch
from safetensors.torch import load_file

from cascade_train.distributed.sharded import SPLITS_CODES
from tests.distributed.test_modes import NARROW, fork
from tests.integration.runs import read_metrics
from tests.unit.models.stages import untrained

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

BOTH = (
    *("train.base_weights=int8", "train.precision=bf16", "optimizer.lr=1e-2", "train.global_batch_size=4"),
    *("train.max_steps=3", "checkpoint.every_steps=null", "activation_checkpointing=true"),
)
OWN = ("task=lora", *BOTH, *NARROW)
SD = (*untrained("sd_tiny"), "objective=ddpm", "task=controlnet", *BOTH)
WHOLE = {"alone": (1, None, OWN), "ddp": (2, None, (*OWN, "parallel=ddp")), "sd_alone": (1, None, SD)}
SPLIT = {
    "fsdp": (2, "look_at_dtypes", (*OWN, "parallel=fsdp")),
    "compiled": (2, "gather_at_once only_trace", (*OWN, "parallel=fsdp", "compile=regional")),
    "sd_fsdp": (2, "look_at_dtypes", (*SD, "parallel=fsdp")),
}
splits_codes = pytest.mark.skipif(not SPLITS_CODES, reason="splitting codes needs torch 2.12")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where the runs lie."""
    return fork(tmp_path_factory.mktemp("int8"), {**WHOLE, **(SPLIT if SPLITS_CODES else {})})


@pytest.mark.parametrize("mode", ["ddp", *(pytest.param(name, marks=splits_codes) for name in ("fsdp", "compiled"))])
def test_two_ranks_train_on_codes_what_one_does(runs, mode):
    alone, found = (read_metrics(runs / name) for name in ("alone", mode))
    for one, other in zip(alone, found, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-2)
    one, other = (load_file(runs / name / "export/lora/adapter_model.safetensors") for name in ("alone", mode))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0.1, atol=2e-2)


@splits_codes
def test_a_control_network_beside_codes_of_stable_diffusion_trains_sharded_as_on_one_rank(runs):
    alone, found = (read_metrics(runs / name) for name in ("sd_alone", "sd_fsdp"))
    for one, other in zip(alone, found, strict=True):
        assert other == pytest.approx(one, rel=2e-2)


@splits_codes
@pytest.mark.parametrize("name", ["fsdp", "sd_fsdp"])
def test_sharded_codes_stay_codes(runs, name):
    notes = (runs / f"{name}_notes" / "dtypes_0").read_text()
    assert '"frozen": ["torch.bfloat16", "torch.int8"]' in notes
