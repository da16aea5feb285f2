"""Equal runs leave equal files, whatever order a process gives its sets and hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.test_modes import B_NARROW
from tests.integration.runs import NARROW, SMALL, once
from tests.integration.test_stage_a import NARROW as A_NARROW
from tests.warm.programs import warm_programs

pytestmark = pytest.mark.slow

RUNS = {
    "lora": (*NARROW, "task=lora", "task.train_tokens=[['[star]','star']]", "task.text_encoder_filters=[.self_attn]"),
    "control": (*NARROW, "task=controlnet", "filter@task.filter=canny", "task.bottleneck=small"),
    "prior": (*NARROW, "task=finetune", "objective=gdf"),
    "decoder": ("task=reconstruction", "model=b_tiny", *B_NARROW, "objective=gdf"),
    "codec": ("task=reconstruction", "model=a_tiny", *(f"model.{each}" for each in A_NARROW)),
}
WHOLE = {name: once(*SMALL, "train.max_steps=1", *arguments) for name, arguments in RUNS.items()}
SCRIPT = f"""
import sys
from cascade_train.__main__ import launch
from cascade_train.commands.export import ExportArgs, export

for name, arguments in {WHOLE!r}.items():
    if launch([*arguments, f"run.dir={{name}}"]) != 0:
        sys.exit(name)
export(ExportArgs(source="lora", format=["peft", "comfyui", "kohya"], out="converted/lora"))
export(ExportArgs(source="prior", format="original", out="converted/prior"))
"""


def files(folder: Path) -> dict[str, bytes]:
    paths = [path for part in ("*/export", "converted") for path in folder.glob(f"{part}/**/*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_exports_of_equal_runs_are_equal_byte_by_byte(tmp_path: Path) -> None:
    """Hashes of the warm Python are those of its own start: of a random seed, unless the environment says otherwise."""
    seed, found = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1", []
    for python in (sys.executable, str(warm_programs() / "python")):
        folder = tmp_path / f"run_{len(found)}"
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [python, "-c", SCRIPT], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(files(folder))
    one, two = found
    assert one.keys() == two.keys()
    assert {"lora/export/README.md", "converted/prior/README.md"} <= one.keys()
    assert {"lora/export/lora/adapter_config.json", "converted/lora/lora.kohya.safetensors"} <= one.keys()
    assert len(one) > 30
    assert [name for name in one if one[name] != two[name]] == []
