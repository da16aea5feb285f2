"""What headers of exports say of a model: Stability's ModelSpec 1.0.1, and the version by kohya's name.

Must not live here: what a family says of its models, tensors, and what else a format's header has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cascade_train.models.family import Family


def model_spec(
    family: Family, network_config: Mapping[str, Any], title: str, *, is_lora: bool, prediction: str | None = None
) -> dict[str, str]:
    """Return the entries of a header, for a network of that diffusers config.

    `prediction` is "epsilon" or "v_prediction"; None = that of the published model of this size.
    """
    own = family.model_spec(network_config, is_lora=is_lora, prediction=prediction)
    architecture = own["modelspec.architecture"]
    return {
        **own,
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{architecture}/lora" if is_lora else architecture,
        "modelspec.title": title,
    }
