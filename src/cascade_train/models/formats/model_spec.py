"""What headers of exports say of a model: Stability's ModelSpec 1.0.1.

Must not live here: what a family says of its models, tensors, and what else a format's header has.
"""

from __future__ import annotations

from collections.abc import Mapping


def model_spec(own: Mapping[str, str], title: str, *, is_lora: bool) -> dict[str, str]:
    """Return the entries of a header; `own` are those that the family gives, see `Family.model_spec`."""
    architecture = own["modelspec.architecture"]
    return {
        **own,
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{architecture}/lora" if is_lora else architecture,
        "modelspec.title": title,
    }
