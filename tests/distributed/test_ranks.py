"""Ranks of torchrun on a set of pictures as users have it, and that ranks end in order."""

import gzip
import random
import subprocess
import sys

import pytest
from PIL import Image

from tests.integration.runs import read_metrics, torchrun
from tests.unit.data import tars

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_lora_trains_on_two_ranks_on_two_shapes_from_a_tar_made_with_tar(tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    draw = random.Random(0)
    for index in range(24):
        colour = draw.choice(["red", "green", "blue"])
        Image.new("RGB", (120, 100 + 140 * (index % 2)), colour).save(folder / f"{index:04d}.jpg")
        (folder / f"{index:04d}.txt").write_text(f"a {colour} background")
    subprocess.run(["tar", "--sort=name", "-cf", "dataset.tar", "dataset/"], cwd=tmp_path, check=True)
    done = torchrun(
        2, "task=lora", "model=c_tiny", "data=webdataset", "data.urls=[dataset.tar]", "train.max_steps=8",
        "train.global_batch_size=8", "data.num_workers=1", "sample.every_steps=8", "sample.steps=2",
        "sample.count=2", "data.aspect_ratios=[1/1,1/2]", "validate.share=0.2", "validate.every_steps=4", cwd=tmp_path,
        warm=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Samples by height x width: 128x64 12, 96x96 11." in done.stderr
    run = tmp_path / "runs" / "lora-c_tiny"
    assert [row["step"] for row in read_metrics(run)] == list(range(1, 9))
    left = {path.name for path in run.iterdir()}
    assert left >= {"config.yaml", "environment.json", "metrics.jsonl", "samples", "checkpoints", "export"}
    assert (run / "checkpoints" / "step_8" / "manifest.json").is_file()
    assert (run / "samples" / "step_8" / "grid.png").is_file()
    assert (run / "export" / "lora" / "adapter_model.safetensors").is_file()


def test_one_compressed_tar_trains_two_ranks_into_further_epochs_and_goes_on(tmp_path):
    path = tars.write(tmp_path / "a.tar", tars.samples(range(13)))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    options = ["task=lora", "model=c_tiny", "data=webdataset", "data.urls=a.tar.gz", "train.global_batch_size=4"]
    options += ["train.micro_batch_size=1", "data.num_workers=1", "sample.every_steps=null"]
    whole = torchrun(2, *options, "train.max_steps=8", "run.dir=whole", cwd=tmp_path, warm=True)
    assert whole.returncode == 0, whole.stderr
    for steps in (4, 8):
        part = torchrun(2, *options, f"train.max_steps={steps}", "run.dir=part", cwd=tmp_path, warm=True)
        assert part.returncode == 0, part.stderr
    assert "skips the 4 samples that were seen" in part.stderr
    losses = [[row["loss"] for row in read_metrics(tmp_path / run)] for run in ("whole", "part")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8


ENDINGS = """
import gc, os, sys
import torch
import torch._dynamo  # what sharding imports, once for all processes
import cascade_train.engine.loop  # and what a run imports
from cascade_train.distributed.parallelize import parallelize
from cascade_train.distributed.process_group import build_mesh, process_group

def end_once(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with process_group() as world:
        layer = torch.nn.Linear(8, 8)
        parallelize(layer, [], mesh=build_mesh(world, (2, 1)), compute_dtype=torch.float32,
                    reshard_after_forward=True, compile_units=False)
        layer(torch.ones(2, 8)).sum().backward()
    sys.exit(0)

gc.freeze()  # else each end looks at all that is imported, and copies it
for turn in range(3):
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            end_once(rank, int(sys.argv[1]) + turn)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0], (turn, codes)
print("ended", turn + 1)
"""


def test_two_ranks_end_in_order_three_times(tmp_path):
    """In an interpreter of their own, which ends as a run's does; a soak repeats it."""
    script = tmp_path / "endings.py"
    script.write_text(ENDINGS)
    command = [sys.executable, str(script), "29871"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.strip() == "ended 3", done.stderr
