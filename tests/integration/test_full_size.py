"""Published networks train an adapter and a control network within a stated memory, with small images."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.warm.programs import warm_programs

pytestmark = [
    pytest.mark.recipes,
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        reason="this CPU multiplies bf16 matrices one number at a time: a step would take ten minutes",
    ),
]

PEAK_GIB = 14.0
"""12.5 were seen. Network, text and image tower in bf16 are 8.6 GiB; the rest is torch and what a unit gathers."""
CONTROL_PEAK_GIB = 7.5
"""6.6 were seen; gradients of the 1B network would be 1.9 more."""

SCRIPT = '''
import json, os, resource, sys
import cascade_train.assembly.run, cascade_train.models.cascade.image_encoder, cascade_train.models.cascade.stage_c
import cascade_train.models.text_encoder, cascade_train.tasks.controlnet, cascade_train.tasks.lora
from cascade_train.__main__ import launch
from cascade_train.engine.loop import Trainer
from cascade_train.models import initialize

def fill_alike(part, fill, seed, name, **_):
    """Repeat the first numbers of a parameter, since billions take half a minute to draw."""
    first, *others = part.detach().view(-1).split(initialize.CHUNK)
    draw(first, fill, seed, name, begin=0, total=len(first))
    for other in others:
        other.copy_(first[: len(other)])

draw, initialize.fill_ = initialize.fill_, fill_alike
train_step = Trainer.train_step
seen = {}

def looking(self, micro_batches):
    (phase,) = self.phases
    clip = phase.clip

    def then_clip(*at):
        parameters = list(self.task.stage.network.parameters())
        frozen = [p for p in parameters if not p.requires_grad]
        seen["billions"] = sum(p.numel() for p in parameters) / 1e9
        seen["frozen_dtypes"] = sorted({str(p.dtype) for p in frozen})
        seen["frozen_with_gradients"] = sum(p.grad is not None for p in frozen)
        seen["trained_without_gradients"] = sum(p.grad is None for p in phase.parameters.values())
        seen["trained"] = len(phase.parameters)
        return clip(*at)

    phase.clip = then_clip
    return train_step(self, micro_batches)

Trainer.train_step = looking
for name, arguments in json.loads(sys.argv[1]).items():  # each in a process of its own, which is what has a peak
    if os.fork() == 0:
        code = launch(arguments)
        seen["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"name": name, "code": code, **seen}), flush=True)
        os._exit(0)
    os.wait()
'''

RUNS = {
    "lora": (PEAK_GIB, ("model=c_3b", "task=lora")),
    "control": (CONTROL_PEAK_GIB, ("model=c_1b", "task=controlnet")),
}
SMALL = (
    *("debug=random_weights", "data=shapes", "model.image_size=128", "data.samples=4", "data.num_workers=0"),
    *("train.max_steps=1", "train.global_batch_size=1", "sample.every_steps=null"),
)


def available_gib():
    """Return the memory that this machine has left, as Linux counts it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable"))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Train one step of each run with random weights on small images; return where it lies and what was seen."""
    folder, free_gib = tmp_path_factory.mktemp("full_size"), available_gib()
    fitting = [name for name, (peak_gib, _) in RUNS.items() if free_gib > peak_gib + 1]
    starts = {name: [*RUNS[name][1], *SMALL, f"run.dir={folder / name}"] for name in fitting}
    done = subprocess.run(
        [str(warm_programs() / "python"), "-c", SCRIPT, json.dumps(starts)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    seen = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(each["name"], each["code"]) for each in seen] == [(name, 0) for name in fitting], done.stderr
    return {each["name"]: (folder / each["name"], each) for each in seen}


def one_step(steps: dict[str, tuple[Path, dict[str, Any]]], name: str) -> tuple[Path, dict[str, Any]]:
    """Return a run and what was seen in it, which is what holds of both."""
    peak_gib, _ = RUNS[name]
    if name not in steps:
        pytest.skip(f"needs {peak_gib + 1} GiB of free memory")
    run, seen = steps[name]
    assert seen["frozen_dtypes"] == ["torch.bfloat16"]
    assert (seen["frozen_with_gradients"], seen["trained_without_gradients"]) == (0, 0)
    assert seen["trained"] > 100
    assert seen["peak_gib"] < peak_gib, seen
    return run, seen


def test_a_step_of_lora_on_the_full_network_fits_and_leaves_the_base_without_gradients(steps: Any):
    run, seen = one_step(steps, "lora")
    assert seen["billions"] == pytest.approx(3.59, abs=0.05)
    assert (run / "export" / "lora" / "adapter_model.safetensors").is_file()


def test_a_step_of_a_control_network_beside_the_1b_network_makes_no_gradients_for_it(steps: Any):
    run, seen = one_step(steps, "control")
    assert seen["billions"] == pytest.approx(1.03, abs=0.01)
    assert (run / "export" / "controlnet" / "controlnet.safetensors").is_file()
