"""The objectives that ship in conf/objective, built as a run builds them, and latents to noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from cascade_train.assembly.build import build_node
from cascade_train.config.groups import option_files, option_targets
from cascade_train.diffusion.objective import Objective

STABLE_DIFFUSION = ("ddpm", "ddpm_debiased", "ddpm_min_snr", "ddpm_v", "edm_sdxl")
OBJECTIVES = tuple(
    sorted(
        (
            "adaptive",
            "constant",
            "debiased",
            "edm",
            "flow_matching",
            "gdf",
            "min_snr",
            "rectified_flow",
            "v",
            "x0",
            *STABLE_DIFFUSION,
        )
    )
)


def shipped() -> list[str]:
    targets = option_targets("objective")
    return sorted(name for name, target in targets.items() if target == "cascade_train.diffusion.objective.Objective")


@pytest.fixture
def build() -> Callable[..., Objective]:
    """Build a shipped objective by name, with some of its own values changed."""

    def build_objective(name: str, **changes: Any) -> Objective:
        return build_node(OmegaConf.merge(option_files("objective")[name], changes))

    return build_objective


@pytest.fixture(params=OBJECTIVES)
def objective(request: pytest.FixtureRequest, build: Callable[..., Objective]) -> Objective:
    return build(request.param)


@pytest.fixture
def latents() -> tuple[Tensor, Tensor, Tensor]:
    """Clean latents (32, 4, 6, 5), noise of that shape, and uniform numbers (32,), the ends of [0, 1) among them."""
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 32, 4, 6, 5, generator=generator)
    u_B = torch.rand(32, generator=generator)
    u_B[0], u_B[1] = 0.0, 1 - 2**-24
    return x0, noise, u_B
