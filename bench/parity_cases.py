"""Which case is run by what."""

from __future__ import annotations

from collections.abc import Callable

from bench import parity_buckets as buckets
from bench import parity_controlnet as controlnet
from bench import parity_data as data
from bench import parity_diffusion as diffusion
from bench import parity_filters as filters
from bench import parity_lora as lora
from bench import parity_networks as networks
from bench import parity_stage_b as stage_b
from bench import parity_text as text
from bench import parity_training as training
from bench.parity_case import NotCoveredError, Outcome, Variant

RUNNERS: dict[str, Callable[[Variant], Outcome]] = {
    "adaptive_loss": diffusion.adaptive_loss,
    "bucketeer": buckets.bucketeer,
    "conditions": lambda variant: (stage_b if variant.args["stage"] == "b" else text).conditions(variant),
    "control_filters": filters.filters,
    "controlnet_modules": controlnet.modules,
    "effnet_encoder": networks.compressor,
    "ema": training.ema,
    "gdf_diffuse": diffusion.diffuse,
    "gdf_loss_weights": diffusion.loss_weights,
    "gdf_noise_conds": diffusion.noise_conditions,
    "gdf_samplers": diffusion.samplers,
    "gdf_scalers_targets": diffusion.scalers_and_targets,
    "gdf_schedules": diffusion.schedules,
    "lora": lora.lora,
    "multifilter": data.multifilter,
    "previewer": networks.previewer,
    "pyramid_noise": diffusion.pyramid_noise,
    "retoken": text.retoken,
    "stage_a_roundtrip": stage_b.stage_a,
    "stage_b_forward": networks.forward,
    "stage_c_cnet": networks.forward,
    "stage_c_forward": networks.forward,
    "train_steps_c": training.finetune_steps,
    "train_steps_lora": lora.lora_steps,
    "warmup_lr": training.warmup,
}


def run(variant: Variant) -> Outcome:
    """Run one variant on our code.

    Raises:
        NotCoveredError: there is nothing of ours to run; says why.
    """
    case = variant.case.name
    if case not in RUNNERS:
        raise NotCoveredError("no such case is known here")
    return RUNNERS[case](variant)
