"""Stage A's reconstructions are measured by LPIPS and rFID where the networks' weights are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torchvision.models.vgg import cfgs, make_layers

from tests.integration.runs import read_metrics, train
from tests.integration.test_stage_a import STAGE_A
from tests.unit.models.inception import untrained_inception

pytestmark = pytest.mark.slow


def test_lpips_and_rfid_of_stage_a_are_beside_its_psnr(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {f"features.{name}": value for name, value in make_layers(cfgs["D"]).state_dict().items()}
    save_file(state, tmp_path / "vgg.safetensors")
    held_out = ("validate.every_steps=1", "validate.share=0.02", "validate.samples=4", "train.max_steps=1")
    one_look = "ema.decay=null"  # each look takes the root of a matrix of 2048 rows
    torch.save(untrained_inception().state_dict(), tmp_path / "inception.pth")
    lpips = (f"validate.lpips={tmp_path / 'vgg.safetensors'}", "validate.reconstructions=2")
    rfid = f"validate.rfid={tmp_path / 'inception.pth'}"
    row = read_metrics(train(tmp_path / "run", *STAGE_A, *held_out, *lpips, rfid, one_look))[-1]
    assert row["validate/rfid"] > 0
    assert row["validate/lpips"] > 0
    assert "validate/psnr" in row
    assert "validate/psnr_bilinear" not in row
