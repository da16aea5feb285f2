"""A training step as diffusers and torch alone compute it, to compare ours with."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor, nn
from torch.nn import functional

SQUARE = torch.tensor([[32.0, 32, 0, 0, 32, 32]])
"""Sizes and crop of a whole picture of 32 x 32."""


def reference_loss(
    pipeline: Any, batch: Any, prepared: Any, *, time_ids: Tensor = SQUARE, control: Any = None
) -> Tensor:
    """Return the loss of each sample as diffusers' training scripts compute it; `control` is a `ControlNetModel`."""
    scheduler, given = DDPMScheduler.from_config(pipeline.scheduler.config), {}
    with torch.no_grad():
        posterior = pipeline.vae.encode(batch.image_BCHW.float() / 127.5 - 1).latent_dist
        latents = (posterior.mean + posterior.std * prepared.drawn["posterior"]) * pipeline.vae.config.scaling_factor
    text, _, *pooled = pipeline.encode_prompt(
        list(batch.captions), device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
    )
    if pooled:
        given["added_cond_kwargs"] = {"text_embeds": pooled[0], "time_ids": time_ids.float().expand(len(text), 6)}
    timesteps = ((1 - prepared.timestep_B) * 1000).long()
    noisy = scheduler.add_noise(latents, prepared.noise_BCHW, timesteps)
    if control is not None:
        edges = prepared.control_BCHW.repeat(1, 3, 1, 1)
        skips, middle = control(noisy, timesteps, text, controlnet_cond=edges, return_dict=False, **given)
        given |= {"down_block_additional_residuals": skips, "mid_block_additional_residual": middle}
    pred = pipeline.unet(noisy, timesteps, text, **given).sample
    return functional.mse_loss(pred, prepared.noise_BCHW, reduction="none").mean(dim=(1, 2, 3))


def assert_equal_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    """Compare the gradients of every weight that trains here; the others have none there."""
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert dict(ours.named_parameters()).keys() == expected.keys()
    for name, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            assert expected[name] is None or not expected[name].any(), f"{name} learns elsewhere"
            continue
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5 * max(1.0, scale), rtol=1e-4, msg=name)
