"""EfficientNet's features for a control map: fixed statistics, any number of channels, weights of three layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.networks.efficientnet import (
    STEM,
    FixedBatchNorm2d,
    build_control_features,
    load_features,
)

KEY = "task.backbone_weights"


@pytest.fixture(scope="module")
def trained() -> dict[str, Tensor]:
    """Values under the features' own names, each tensor filled with a number of its own."""
    with torch.device("meta"):
        state = build_control_features(3).state_dict()
    return {name: torch.full(t.shape, 1e-4 * i).to(t.dtype) for i, (name, t) in enumerate(state.items())}


def features(channels: int = 3) -> nn.Module:
    with torch.device("meta"):
        made = build_control_features(channels)
    return made.to_empty(device="cpu")


def write(folder: Path, tensors: dict[str, Tensor]) -> str:
    save_file(tensors, folder / "weights.safetensors")
    return str(folder / "weights.safetensors")


def test_statistics_stay_fixed_in_training_mode_and_scale_and_shift_train() -> None:
    ours, torchs = FixedBatchNorm2d(4, eps=1e-3).train(), nn.BatchNorm2d(4, eps=1e-3).eval()
    for norm in (ours, torchs):
        norm.running_mean = torch.tensor([0.1, -0.2, 0.3, 0.0])
        norm.running_var = torch.tensor([1.0, 2.0, 0.5, 3.0])
    x = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours(x), torchs(x))
    assert torch.equal(ours.running_mean, torchs.running_mean)
    ours(x).square().sum().backward()
    assert ours.weight.grad.abs().min() > 0


def test_a_norm_of_bf16_weights_computes_in_fp32_and_returns_bf16() -> None:
    norm = FixedBatchNorm2d(2).bfloat16()
    norm.running_mean, norm.running_var = torch.tensor([0.5, 0.25]), torch.tensor([2.0, 4.0])
    x = torch.randn(1, 2, 3, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = (x.float() - norm.running_mean.view(2, 1, 1)) / (norm.running_var.view(2, 1, 1) + norm.eps).sqrt()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).float(), expected, rtol=1e-2, atol=1e-2)


def test_no_layer_of_the_features_depends_on_the_batch() -> None:
    norms = [m for m in features(1).modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) > 50
    assert all(isinstance(norm, FixedBatchNorm2d) for norm in norms)


@pytest.mark.parametrize(("prefix", "channels"), [("features.", 3), ("backbone.", 1), ("", 5)])
def test_weights_of_every_layout_fill_the_colours_that_there_are(
    prefix: str, channels: int, trained: dict[str, Tensor], tmp_path: Path
) -> None:
    made, kept = features(channels), min(channels, 3)
    others = {"classifier.1.weight": torch.ones(2, 2), "mapper.0.weight": torch.ones(2)} if prefix else {}
    load_features(made, write(tmp_path, {f"{prefix}{n}": v for n, v in trained.items()} | others), key=KEY)
    found = made.state_dict()
    assert found[STEM].shape == (24, channels, 3, 3)
    assert torch.equal(found[STEM][:, :kept], trained[STEM][:, :kept])
    assert not found[STEM][:, 3:].any()
    assert all(torch.equal(found[name], value) for name, value in trained.items() if name != STEM)
    assert made[0][0].weight.requires_grad


def test_imagenet_is_torchvisions_own(trained: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(url: str, **_: Any) -> dict[str, Tensor]:
        asked.append(url)
        return {f"features.{n}": v for n, v in trained.items()} | {"classifier.1.bias": torch.zeros(2)}

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", download)
    made = features()
    load_features(made, "imagenet", key=KEY)
    assert len(asked) == 1
    assert torch.equal(made.state_dict()[STEM], trained[STEM])


def test_weights_of_something_else_are_refused(trained: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="not the weights of EfficientNet-V2-S .*name those of EfficientNet-V2-S, or null"
    ):
        load_features(features(), write(tmp_path, {"conv.weight": torch.zeros(2)}), key=KEY)
    wide = trained | {"7.0.weight": torch.zeros(1280, 8, 1, 1)}
    with pytest.raises(
        ConfigError,
        match=r"7.0.weight has shape \(1280, 8, 1, 1\), this model needs .*; name those of EfficientNet-V2-S",
    ):
        load_features(features(), write(tmp_path, wide), key=KEY)
