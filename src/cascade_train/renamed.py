"""Names that components had in earlier versions, by which configurations may still name them."""

from __future__ import annotations

_DATA, _MODELS, _DIFFUSION = "cascade_train.data", "cascade_train.models", "cascade_train.diffusion"
_FILTERS = "cascade_train.filters"

RENAMED = {
    **{
        f"{_MODELS}.{old}": f"{_MODELS}.{new}"
        for old, new in (
            ("cascade_unet_config", "cascade.unet_config"),
            ("condition_unet_config", "stable_diffusion.unet_config"),
            ("convolutional", "cascade.convolutional"),
            ("image_encoder", "cascade.image_encoder"),
            ("latent_codec", "cascade.latent_codec"),
            ("previewer", "cascade.previewer"),
            ("semantic_compressor", "cascade.semantic_compressor"),
            ("stable_diffusion", "stable_diffusion.stage"),
            ("stage_a", "cascade.stage_a"),
            ("stage_b", "cascade.stage_b"),
            ("stage_c", "cascade.stage_c"),
        )
    },
    "cascade_train.engine.lr_schedule.CosineSchedule": "cascade_train.engine.lr_schedule.CosineDecaySchedule",
    "torch.optim.Adafactor": "cascade_train.engine.algorithms.adafactor.Adafactor",
    f"{_DATA}.regularised.Regularised": f"{_DATA}.mixture.Regularised",
    f"{_FILTERS}.onnx_network.OnnxFilter": f"{_FILTERS}.network.OnnxFilter",
    f"{_FILTERS}.torch_network": f"{_FILTERS}.network",
    f"{_MODELS}.stage_vae.VAEStage": f"{_MODELS}.autoencoder_kl.VAEStage",
    f"{_DIFFUSION}.noise_condition.StableDiffusionCondition": f"{_DIFFUSION}.noise_condition.ScaledLinearCondition",
    f"{_DIFFUSION}.schedule.StableDiffusionSchedule": f"{_DIFFUSION}.schedule.ScaledLinearSchedule",
}
"""Module or class as it was named -> its name today."""


def current_target(target: str) -> str:
    """Return today's name of the class that a `_target_` names, by any name that it ever had."""
    if target in RENAMED:
        return RENAMED[target]
    module, _, name = target.rpartition(".")
    return f"{RENAMED[module]}.{name}" if module in RENAMED else target


def first_target(target: str) -> str:
    """Return the name that a class had first, whatever it is called today: what digests are made of stays."""
    old = next((old for old, new in RENAMED.items() if new in (target, target.rpartition(".")[0])), None)
    if old is None:
        return target
    return old if RENAMED[old] == target else f"{old}.{target.rpartition('.')[2]}"
