"""Only a stage that reconstructs images is measured by its reconstructions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cascade_train.assembly.samples import build_reconstructions
from cascade_train.errors import ConfigError
from tests.unit.config.composing import checked
from tests.unit.models.stages import make_stage


@pytest.mark.parametrize("model", ["c_tiny", "a_tiny"])
def test_other_stages_than_b_are_refused(model: str) -> None:
    task = "finetune" if model == "c_tiny" else "reconstruction"
    cfg = checked(f"model={model}", f"task={task}", "validate.reconstructions=2")
    with pytest.raises(ConfigError, match="validate.reconstructions=2: is for a Stage B, which reconstructs"):
        build_reconstructions(
            cfg, SimpleNamespace(stage=make_stage(model)), held_out=lambda samples: None, device=torch.device("cpu")
        )
