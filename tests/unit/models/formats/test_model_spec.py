"""Headers name models as the programs that read them do; each name stands with the line that has it."""

from __future__ import annotations

import pytest

from cascade_train.models.formats.model_spec import model_spec
from cascade_train.results.find import stored_network

NAMES = {
    "sd15": ("stable-diffusion-v1", "sd_v1", "512x512"),  # sd-scripts 48d368f, library/sai_model_spec.py:70
    "sd21_base": ("stable-diffusion-v2-512", "sd_v2", "512x512"),  # :71
    "sd21": ("stable-diffusion-v2-768-v", "sd_v2_v", "768x768"),  # :72, and library/model_util.py:1081
    "sdxl": ("stable-diffusion-xl-v1-base", "sdxl_base_v1-0", "1024x1024"),  # :73, and library/sdxl_model_util.py:19
    "c_3b": ("stable-cascade-v1-stage-c", None, "1024x1024"),  # SwarmUI, T2IModelClassSorter
    "b_3b": ("stable-cascade-v1-stage-b", None, "1024x1024"),
}
"""Model -> architecture, base version, resolution."""


@pytest.mark.parametrize("model", NAMES)
def test_a_header_names_the_model_as_its_readers_do(model: str) -> None:
    architecture, version, resolution = NAMES[model]
    network = stored_network("any", model=model, key="from")
    family, config = network.family, dict(network.config)
    for is_lora, ending in ((False, ""), (True, "/lora")):
        own = family.model_spec(config, is_lora=is_lora, prediction=None)
        found = model_spec(own, "mine", is_lora=is_lora)
        assert found["modelspec.architecture"] == architecture + ending
        assert found.get("ss_base_model_version") == version
        assert (found["modelspec.title"], found["modelspec.resolution"]) == ("mine", resolution)
        assert found["modelspec.sai_model_spec"] == "1.0.1"  # :115
    predicts = None if version is None else "v" if version.endswith("_v") else "epsilon"  # :118
    assert found.get("modelspec.prediction_type") == predicts
