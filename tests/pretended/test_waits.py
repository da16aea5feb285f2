"""No step waits for the device: shown without one, on a device that is pretended (device.py), for all that trains."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_optimizer

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.config.groups import group_options
from tests.pretended.runs import PLANTED

pytestmark = pytest.mark.slow

BASE = (
    *("data=shapes", "data.num_workers=0", "train.global_batch_size=2", "train.max_steps=9", "sample.every_steps=null"),
    *("checkpoint.every_steps=null", "log.every_steps=null"),
)
SMALL = ("task=finetune", *SMALL_NETWORK)
BF16 = "train.precision=bf16"
ACCUMULATED = ("train.global_batch_size=4", "train.micro_batch_size=1")
OPTIMIZERS = [option for option in group_options("optimizer") if option != "torch"]
PRODIGY_WAITS = {"torch.tensor([0.0], device=device)", "if d_de_nom == 0:", ".item()"}
"""Lines of pytorch_optimizer's Prodigy that make the host wait, once a step each."""
RUNS = {
    "c": ("task=finetune", "model=c_tiny", "ema.decay=0.9"),
    "c lora": ("task=lora", "model=c_tiny", BF16),
    "c control": ("task=controlnet", "model=c_tiny", "task.bottleneck=small"),
    "b": ("task=reconstruction", "model=b_tiny", BF16),
    "sd": ("task=finetune", "model=sd_tiny", "ema.decay=0.9"),
    "sd control": ("task=controlnet", "model=sd_tiny"),
    "sdxl lora": ("task=lora", "model=sdxl_tiny"),
    "adaptive weights, accumulated": (*SMALL, "objective=adaptive", BF16, *ACCUMULATED, "ema.decay=0.9"),
    "a": ("task=reconstruction", "model=a_tiny", "objective=vqgan"),
    "autoencoder": ("task=reconstruction", "model=vae_tiny", "objective=autoencoder_kl"),
    "previewer": ("task=reconstruction", "model=c_tiny", "objective=preview"),
}
KINDS = {
    "item": ("wait", "aten::_local_scalar_dense"),
    "branch": ("wait", "aten::_local_scalar_dense"),
    "mask": ("wait", "aten::index.Tensor by a mask"),
    "cpu": ("to_host_blocking", "aten::_to_copy"),
    "copy": ("to_device_blocking", "aten::copy_"),
    "mix": ("mix", "aten::add.Tensor"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory, repository):
    folder: Path = tmp_path_factory.mktemp("pretended")
    runs = {name: {"overrides": [*BASE, *each], "planted": False} for name, each in RUNS.items()}
    runs |= {each: {"overrides": [*BASE, *SMALL, f"optimizer={each}"], "planted": False} for each in OPTIMIZERS}
    runs["planted"] = {"overrides": [*BASE, *SMALL], "planted": True}
    (folder / "runs.json").write_text(json.dumps(runs))
    program = [sys.executable, str(Path(__file__).with_name("runs.py")), str(folder)]
    done = subprocess.run(program, cwd=repository, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_a_step_does_not_wait_and_only_its_batch_comes_to_the_device(found, name):
    """Copied without waiting, by the one function that does; and it trains as on the host, to the bit."""
    noted = {tuple(each) for each in found[name]["noted"]}
    others = {each for each in noted if not (each[0] == "to_device" and each[2].startswith("models/stage.py:"))}
    assert others == set()
    assert noted, "a batch that came to the device was not seen"
    assert found[name]["device"] == found[name]["host"]


@pytest.mark.parametrize("option", OPTIMIZERS)
def test_no_optimizer_waits_but_for_lines_of_a_library(found, option):
    assert found[option]["device"] == found[option]["host"]
    waits = [each for each in found[option]["noted"] if not each[2].startswith("models/stage.py:")]
    assert len(waits) == (len(PRODIGY_WAITS) if option == "prodigy" else 0), waits
    source = inspect.getsource(pytorch_optimizer.Prodigy.step)
    assert [line for line in PRODIGY_WAITS if line not in source] == []


@pytest.mark.parametrize("mistake", PLANTED)
def test_each_kind_of_mistake_is_found_where_it_was_made(found, mistake):
    line = PLANTED[mistake].__code__.co_firstlineno
    noted = [(kind, name) for kind, name, where in found["planted"]["noted"] if where.startswith(f"runs.py:{line} ")]
    assert noted == [KINDS[mistake]]
