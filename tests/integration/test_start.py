"""What a training imports: the libraries that its task needs, and none beside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.soak_ranks import SMALL_NETWORK

pytestmark = pytest.mark.slow

NEVER = {
    *("matplotlib", "moto", "onnxruntime", "pandas", "pyarrow", "scipy", "sklearn", "submitit", "tensorboard"),
    *("torch._inductor.compile_fx", "torch.utils.tensorboard", "torchmetrics", "wandb", "webdataset"),
    *("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio"),
    *("diffusers.models.autoencoders", "diffusers.models.transformers", "diffusers.pipelines.pipeline_utils"),
    *("diffusers.guiders", "diffusers.models.unets.unet_2d_condition", "diffusers.pipelines"),
}
"""Modules of half a second and more, and what would bring diffusers' own to a run of Stage C."""

TRAIN = """
import atexit, gc, json, sys
from cascade_train.__main__ import launch, main
from cascade_train.engine.loss_charts import LossCurve
LossCurve.draw = lambda self: None  # brings matplotlib at the first save, which is later than the start
for task, *own in (["lora"], ["controlnet", "task.bottleneck=small"]):
    code = launch([f"task={task}", f"run.dir={task}", *own, *sys.argv[1:]])
    print(json.dumps([task, code, sorted(sys.modules)]))
assert gc.get_freeze_count() == 0, "this process is not a run's own"
unfreeze = gc.unfreeze
def report():
    print(json.dumps(["finetune", gc.isenabled() and gc.get_freeze_count(), sorted(sys.modules)]))
    unfreeze()
gc.unfreeze = report
atexit.register(lambda: print(json.dumps(["exit", gc.isenabled(), []])))
sys.argv[1:] = ["task=finetune", "run.dir=finetune", *sys.argv[1:]]
main()
"""


def test_a_training_imports_what_its_task_needs(tmp_path: Path):
    choice = (*SMALL_NETWORK, "train.max_steps=1", "train.global_batch_size=1", "sample.every_steps=null")
    command = [sys.executable, "-c", TRAIN, *choice]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [each[:2] for each in found[:2]] == [["lora", 0], ["controlnet", 0]]
    assert found[2][1] > 100_000, "objects that garbage collection leaves alone while it trains"
    assert found[3][:2] == ["exit", False], "no collection beside the two of Python's own as it exits"
    assert not done.stderr.count("Exception ignored"), done.stderr
    lora, controlnet, finetune = (set(modules) for _, _, modules in found[:3])
    assert {"peft", "transformers", "PIL.Image", "torch.distributed.checkpoint"} <= lora
    assert not NEVER & lora
    assert "cv2" not in lora, "that of Canny edges"
    assert not NEVER & controlnet
    assert "cv2" in controlnet
    assert "cascade_train.models.cascade.formats.export_pipelines" in finetune
    assert not NEVER & finetune, "also where it exports a folder for a pipeline of diffusers"
