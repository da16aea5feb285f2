"""The parity benchmark fails when a number is wrong, and says what it does not cover."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from bench.parity import main

HERE = Path(__file__).parent / "cases"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for case in ("warmup_lr", "ema"):
        shutil.copytree(HERE / case, tmp_path / "cases" / case)
    return tmp_path


def spoil(folder: Path, name: str, by: float) -> None:
    path = folder / "cases" / "warmup_lr" / "tensors.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[name] + by
    save_file(tensors, path)


def test_equal_numbers_pass_and_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--golden", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == ["case", "variant", "quantity", "error", "tolerance"]
    assert "warmup_lr  v1_warmup5_start0" in printed
    assert "ema (function_int_buffer: ema.*.bn.num_batches_tracked): whole numbers are not averaged" in printed
    assert "0 failed" in printed


@pytest.mark.parametrize("by", [1e-6, float("nan")])
def test_a_wrong_number_fails_and_is_named(folder: Path, by: float, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(folder, "v1_warmup5_start0/out/lr_used", by)
    assert main(["--golden", str(folder / "cases"), "--full"]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert len(failed) == 1
    assert failed[0].split()[:3] == ["warmup_lr", "v1_warmup5_start0", "lr_used"]
