"""Models of the published sizes: their parameters, their names in headers, and random weights in place of downloads."""

from __future__ import annotations

import pytest

from cascade_train.models.formats.export import model_spec
from tests.unit.models.stages import make_stage, random_weights

SIZES = {
    "c_3b": (3_589_103_632, "stable-cascade-v1-stage-c", None, 1024),  # SwarmUI, T2IModelClassSorter
    "c_1b": (1_030_785_040, "stable-cascade-v1-stage-c", None, 1024),
    "b_3b": (1_562_941_136, "stable-cascade-v1-stage-b", None, 1024),
    "b_700m": (699_471_248, "stable-cascade-v1-stage-b", None, 1024),
    "sd15": (859_520_964, "stable-diffusion-v1", "sd_v1", 512),  # sd-scripts 48d368f, library/sai_model_spec.py:70
    "sd21_base": (865_910_724, "stable-diffusion-v2-512", "sd_v2", 512),  # :71
    "sd21": (865_910_724, "stable-diffusion-v2-768-v", "sd_v2_v", 768),  # :72, and library/model_util.py:1081
    "sdxl": (2_567_463_684, "stable-diffusion-xl-v1-base", "sdxl_base_v1-0", 1024),  # :73, sdxl_model_util.py:19
}
"""Model -> parameters, architecture, base version, side in pixels."""


@pytest.mark.parametrize("model", SIZES)
def test_a_published_size_is_that_and_is_named_so_by_readers_of_headers(model: str) -> None:
    parameters, architecture, version, side = SIZES[model]
    stage = make_stage(model, random_weights())
    assert stage.weight_specs() == []
    assert stage.text_encoder.tokenizer_source is None
    network = stage.network_config.build()
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert {p.device.type for p in network.parameters()} == {"meta"}
    assert len(network.units()) == {"c_3b": 64, "c_1b": 32}.get(model, len(network.units()))
    for is_lora, ending in ((False, ""), (True, "/lora")):
        own = stage.family.model_spec(dict(network.config), is_lora=is_lora, prediction=None)
        found = model_spec(own, "mine", is_lora=is_lora)
        assert found["modelspec.architecture"] == architecture + ending
        assert found.get("ss_base_model_version") == version
        assert (found["modelspec.title"], found["modelspec.resolution"]) == ("mine", f"{side}x{side}")
        assert found["modelspec.sai_model_spec"] == "1.0.1"  # :115
    predicts = None if version is None else "v" if version.endswith("_v") else "epsilon"  # :118
    assert found.get("modelspec.prediction_type") == predicts
    if version is not None:
        assert found["ss_v2"] == str(model.startswith("sd21")), "A1111 hides the file else"
        named = {"epsilon": "epsilon", "v_prediction": "v", "": None}
        for prediction, told in named.items():
            own = stage.family.model_spec(dict(network.config), is_lora=True, prediction=prediction)
            assert own.get("modelspec.prediction_type") == told


def test_weights_given_beside_random_ones_are_kept() -> None:
    assert make_stage("c_3b", random_weights(), {"weights": "my/prior"}).weights == "my/prior"
