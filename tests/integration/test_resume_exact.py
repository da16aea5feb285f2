"""Every task, stopped at any step and continued, leaves bit for bit what it leaves when it is never stopped.

Each run of the table is stopped at a step drawn at random, once for good, as its name in the test's id says.
"""

from __future__ import annotations

import io
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from cascade_train.assembly import run as build
from cascade_train.engine.checkpoint.folder import read_manifest
from cascade_train.engine.tracking import Tracker
from tests.integration.runs import NARROW, cut_back, read_metrics, train
from tests.unit.data import tars
from tests.unit.models.stages import untrained

pytestmark = pytest.mark.slow

STEPS = 3
SHORT = (
    *("train.global_batch_size=4", "train.micro_batch_size=2", f"train.max_steps={STEPS}", "data.num_workers=0"),
    *("checkpoint.keep_last=null", "sample.every_steps=null", "ema.decay=0.5", "ema.start_step=2"),
    "ema.post_hoc=[0.05,0.2]",
)
LORA = ("task=lora", "model.weights={base}", "task.rank=2", "task.dropout=0.5", "optimizer.lr=1e-2")
TOKENS = 'task.train_tokens=[["[sides]","^left</w>"],["^(red|on|background)</w>",null]]'
RUNS = {
    "finetune": (
        *("task=finetune", "model.weights={base}", "objective=adaptive", "optimizer.lr=1e-3"),
        *("data.num_workers=2", "data.flip_prob=0.5"),
        *("lr_scheduler=cosine", "lr_scheduler.warmup_steps=2", "data.samples=10", "model.network.dropout=[0.1,0.1]"),
        *("validate.share=0.3", "validate.samples=2", "validate.every_steps=1", "validate.logsnr=[0]"),
    ),
    "lora": (*LORA, "train.precision=bf16", "activation_checkpointing=true"),
    "lokr": (
        *("task=lora", "model.weights={base}", "task.kind=lokr", "task.rank=2", "optimizer.lr=1e-2"),
        *("task.preserve=[[circle,square]]", "train.precision=bf16", "activation_checkpointing=true"),
    ),
    "loha_of_stable_diffusion": (
        *("task=lora", *untrained("sd_tiny"), "task.kind=loha", "task.rank=2", "optimizer.lr=1e-2"),
        *("task.text_encoder_filters=[.self_attn]", "train.precision=bf16"),
    ),
    "schedule_free": (
        *(
            *LORA,
            "ema.decay=null",
            "ema.post_hoc=null",
            "optimizer=schedule_free",
            "optimizer.lr=1e-2",
            "lr_scheduler.warmup_steps=2",
        ),
        *("validate.share=0.3", "validate.samples=2", "validate.every_steps=1", "validate.logsnr=[0]"),
    ),
    "tokens": (
        *("experiment=tiny_token", *NARROW, *LORA[1:], TOKENS, "task.dora=true"),
        "task.text_encoder_filters=[.self_attn]",
    ),
    "controlnet_on_streams": (
        *("task=controlnet", "filter@task.filter=canny", "task.bottleneck=small", "model.weights={base}"),
        *("data=webdataset", 'data.urls=["pipe:cat {tar}"]', "optimizer.lr=1e-2"),
    ),
    "reconstruction_of_a_mixture": (
        *("task=reconstruction", "model=b_tiny", "data=mixture", "data.shares={{a: 0.7, b: 0.3}}"),
        *("+data@data.sources.a=shapes", "+data@data.sources.b=shapes", "data.sources.b.seed=1"),
    ),
    "stable_diffusion": (
        *(
            "task=finetune",
            *untrained("sd_tiny"),
            "objective=ddpm_min_snr",
            "objective.offset_noise=0.1",
            "data.crop=random",
        ),
        *("objective.input_perturbation=0.1", "optimizer.lr=1e-3", "activation_checkpointing=true"),
        *("model.text_encoder.train=true", "model.text_encoder.lr=1e-4"),
        *("validate.share=0.3", "validate.samples=2", "validate.every_steps=1", "validate.logsnr=[0]"),
    ),
    "stable_diffusion_xl_lora": (
        *(
            "task=lora",
            *untrained("sdxl_tiny"),
            "task.rank=2",
            "task.dropout=0.5",
            "task.dora=true",
            "optimizer.lr=1e-2",
        ),
        *("task.text_encoder_filters=[.self_attn]", TOKENS, "model.text_encoder_2.lr=1e-3"),
        *("model.text_encoder.stop_after=1", "model.text_encoder_2.stop_after=0.5"),
        *("train.precision=bf16", "activation_checkpointing=true"),
    ),
    "controlnet_of_stable_diffusion": (
        *("task=controlnet", *untrained("sd_tiny"), "train.precision=bf16", "activation_checkpointing=true"),
        *("optimizer.lr=1e-2", "task.control_drop_prob=0.3"),
    ),
    "previewer": (
        *("task=reconstruction", "model=c_tiny", "objective=preview", "model.previewer.weights=null"),
        *("task.train_compressor=true", "objective.latent_noise=0.1"),
    ),
}
STOPS = {name: random.Random(f"where {name} stops").randrange(1, STEPS) for name in RUNS}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A network whose last layer is not zero any more, so that what lies in front of it learns, and a tar."""
    folder = tmp_path_factory.mktemp("before")
    short = ("train.max_steps=2", "train.global_batch_size=2", "optimizer.lr=3e-3")
    base = train(folder / "base", *NARROW, "task=finetune", *short)
    return {"base": base, "tar": tars.write(folder / "a.tar", [file for key in range(20) for file in chequered(key)])}


def chequered(key: int) -> list[tuple[str, bytes]]:
    """Return a picture of squares, which has edges, and its caption."""
    squares = np.random.default_rng(key).integers(0, 2, (6, 6), dtype=np.uint8) * 255
    file = io.BytesIO()
    Image.fromarray(squares.repeat(16, axis=0).repeat(16, axis=1)).convert("RGB").save(file, "PNG")
    return [(f"{key:02d}.png", file.getvalue()), (f"{key:02d}.txt", b"squares")]


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers that make a new id where they are given none."""
    numbers = itertools.count()
    monkeypatch.setattr(build, "build_tracker", lambda *_, run_id, **__: Tracker(run_id or f"id-{next(numbers)}"))


def left(directory: Path) -> dict[str, object]:
    """Return what a run leaves: its numbers, its whole state after the last step, and its results."""
    last = read_manifest(directory / "checkpoints" / f"step_{STEPS}")
    return {
        "metrics": read_metrics(directory),
        "state": {name: file.sha256 for name, file in last.files.items() if name.endswith(".distcp")},
        "facts": last.facts,
        "results": {file.name: content(file) for file in (directory / "export").rglob("*.safetensors")},
    }


def content(file: Path) -> tuple[dict[str, str] | None, dict[str, bytes]]:
    """Return the header and the tensors' bytes; their order in the file is nobody's promise."""
    with safe_open(file, "numpy") as stored:
        return stored.metadata(), {name: stored.get_tensor(name).tobytes() for name in stored.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", [f"{name}_at_{stop}" for name, stop in STOPS.items()])
@pytest.mark.usefixtures("tracked")
def test_stopped_and_continued_is_never_stopped(name: str, places: dict[str, Path], tmp_path: Path) -> None:
    name, _, stop = name.rpartition("_at_")
    model = () if any(each.startswith(("model=", "experiment=")) for each in RUNS[name]) else ("model=c_tiny", *NARROW)
    given = [*model, *SHORT, *(each.format(**places) for each in RUNS[name])]
    whole = train(tmp_path / "whole", *given, f"checkpoint.every_steps={stop}")
    parts = train(cut_back(whole, tmp_path / "parts", int(stop)), *given, "checkpoint.every_steps=null")
    expected, found = left(whole), left(parts)
    for what, value in expected.items():
        assert found[what] == value, what
    assert expected["state"]
    assert expected["results"]
    assert expected["facts"]["tracker_run_id"] == "id-0"
    (line,) = map(json.loads, (parts / "config_history.jsonl").read_text().splitlines())
    assert line["step"] == int(stop)
    assert line["changes"].keys() - {"data.listing"} == {"checkpoint.every_steps", "run.dir"}
    assert all(row["grad_norm"] > 0 for row in expected["metrics"]), "what gets no gradient continues anyhow"
