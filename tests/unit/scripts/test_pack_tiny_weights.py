"""What the runs of tiny models left goes into the package: each part from its run, in half precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import pack_tiny_weights as script


def leave_runs(folder: Path, parts: dict[str, str]) -> Path:
    """Write the runs of a family, with a weight and a counter for each part; return their folder."""
    for number, (part, run) in enumerate(parts.items()):
        export = folder / run / "export" / Path(part).name
        export.mkdir(parents=True)
        tensors = {"weight": torch.tensor([number + 1 / 3]), "count": torch.tensor(number)}
        save_file(tensors, export / "model.safetensors")
        (export / "config.json").write_text(part)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return leave_runs(tmp_path / "runs", script.CASCADE)


@pytest.mark.parametrize("family", ["CASCADE", "STABLE_DIFFUSION"])
def test_every_part_is_packed_as_half_precision(tmp_path: Path, family: str) -> None:
    parts = getattr(script, family)
    assert script.main([str(leave_runs(tmp_path / "runs", parts)), "--out", str(tmp_path / "out")]) == 0
    for number, part in enumerate(parts):
        packed = load_file(tmp_path / "out" / part / "model.safetensors")
        assert torch.equal(packed["weight"], torch.tensor([number + 1 / 3], dtype=torch.float16))
        assert torch.equal(packed["count"], torch.tensor(number))
    beside = [str(file.parent.relative_to(tmp_path / "out")) for file in tmp_path.glob("out/**/config.json")]
    assert sorted(beside) == sorted(part for part in parts if "text_encoder" in part), "which transformers reads"


def test_a_value_beyond_half_precision_is_refused(runs: Path, tmp_path: Path) -> None:
    save_file({"weight": torch.tensor([1e6])}, runs / "c" / "export" / "prior" / "model.safetensors")
    with pytest.raises(ValueError, match="prior/model.safetensors: weight holds a value that fp16 does not"):
        script.main([str(runs), "--out", str(tmp_path / "out")])
