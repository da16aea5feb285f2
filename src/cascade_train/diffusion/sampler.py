"""Samplers: from noise to latents by a network's predictions, with classifier-free guidance.

Shape legend: B batch, S noise levels, C channels, H W latent size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from cascade_train.diffusion.noise import PlainNoise
from cascade_train.diffusion.objective import Objective
from cascade_train.diffusion.scaling import per_sample
from cascade_train.diffusion.schedule import Schedule
from cascade_train.options import check_above, check_choice, check_within

Predict = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Maps noised (B, C, H, W) and timestep_ratio (B,) to (conditional, unconditional or None) predictions."""

Noise = Callable[[], Tensor]
"""Draws the next standard normal (B, C, H, W), fp32."""

Rescale = Literal["sample", "batch"]
"""What the standard deviations of the guidance rescale are taken over."""


@dataclass(frozen=True, kw_only=True)
class ImageNoise:
    """Standard normals that do not depend on the batch: one CPU generator per image, latents of `shape` (C, H, W)."""

    generators: Sequence[torch.Generator]
    shape: tuple[int, int, int]
    device: torch.device

    def __call__(self) -> Tensor:
        """The next (B, C, H, W), fp32."""
        return PlainNoise().draw(self.generators, self.shape).to(self.device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Signal and noise scale before and after a step, each (1, 1, 1) fp32."""

    a: Tensor
    b: Tensor
    a_next: Tensor
    b_next: Tensor


@dataclass(frozen=True, kw_only=True)
class SampleStep:
    """A step's predicted clean latents, the noised latents that the next starts from, and the guided prediction.

    All (B, C, H, W) fp32.
    """

    x0: Tensor
    x: Tensor
    pred: Tensor


Update = Callable[[Tensor, Tensor, Tensor, Scales], Tensor]
"""Maps x0, predicted noise, fresh noise (all (B, C, H, W)) and `Scales` to the next x."""


def ddim_step(x0: Tensor, eps: Tensor, noise: Tensor, scales: Scales, *, eta: float = 0.0) -> Tensor:
    """Step of DDIM (Song et al. 2021, eq. 12 and 16), for any signal and noise scales.

    A share eta^2 * (1 - SNR / SNR_next) of b_next^2 is new noise; eta = 0 is deterministic.
    """
    snr_ratio = (scales.a * scales.b_next / (scales.a_next * scales.b)) ** 2
    fresh = (eta**2 * (1 - snr_ratio)).clamp(0, 1)
    return scales.a_next * x0 + scales.b_next * ((1 - fresh).sqrt() * eps + fresh.sqrt() * noise)


ddpm_step = partial(ddim_step, eta=1.0)
"""Step of ancestral sampling (Ho et al. 2020, eq. 6-7)."""


def lcm_step(x0: Tensor, eps: Tensor, noise: Tensor, scales: Scales) -> Tensor:
    """Step of consistency sampling (Luo et al. 2023, algorithm 3): noise the predicted x0 afresh."""
    return scales.a_next * x0 + scales.b_next * noise


UPDATES: Mapping[str, Update] = MappingProxyType({"ddpm": ddpm_step, "ddim": ddim_step, "lcm": lcm_step})
"""The update rules by the name that `sample.sampler` gives them."""


def apply_guidance(
    cond: Tensor, uncond: Tensor, *, scale: float | Tensor, rescale: float, rescale_over: Rescale
) -> Tensor:
    """Mix predictions (B, C, H, W) fp32 (Ho & Salimans 2022, eq. 6), and rescale them (Lin et al. 2023, eq. 15-16).

    `scale` 1 = the conditional prediction; `rescale` is the share of the rescaled prediction, in [0, 1]; its standard
    deviations are per "sample", or over the "batch" as in the original.
    """
    mixed = uncond + scale * (cond - uncond)
    if rescale == 0:
        return mixed
    axes = (1, 2, 3) if rescale_over == "sample" else (0, 1, 2, 3)
    factor = cond.std(axes, keepdim=True) / (mixed.std(axes, keepdim=True) + 1e-9)
    return rescale * factor * mixed + (1 - rescale) * mixed


@torch.no_grad()
def sample(
    predict: Predict,
    *,
    objective: Objective,
    noise: Noise,
    steps: int,
    shift: float = 1.0,
    guidance_scale: float | tuple[float, float] | None = None,
    guidance_rescale: float = 0.7,
    rescale_over: Rescale = "sample",
    t_start: float = 1.0,
    t_end: float = 0.0,
    x_init: Tensor | None = None,
    sampler: str | Update = "ddpm",
    schedule: Schedule | None = None,
    on_step: Callable[[SampleStep], None] | None = None,
) -> Tensor:
    """Sample latents and return the x0 prediction of the last step, (B, C, H, W) fp32.

    Args:
        predict: the network on its conditions, see `Predict`.
        objective: that the network was trained with.
        noise: such as `ImageNoise`; called once at the start, unless `x_init` is given, and once per step.
        steps: number of network evaluations.
        shift: shift of the noise levels (see `Schedule`).
        guidance_scale: None = off; a pair = the scales at t = 1 and t = 0, linear between.
        guidance_rescale: see `apply_guidance`.
        rescale_over: see `apply_guidance`.
        t_start: time of the first step.
        t_end: time that the last step ends at.
        x_init: (B, C, H, W) latents already noised to `t_start`; None = start from noise.
        sampler: "ddpm", "ddim", "lcm", or an update rule.
        schedule: noise levels for sampling; None = the objective's.
        on_step: called after every step.
    """
    _check(steps, shift, guidance_rescale, rescale_over, t_start, t_end, sampler)
    update = UPDATES[sampler] if isinstance(sampler, str) else sampler
    x = noise() if x_init is None else x_init.float()
    t_S = torch.linspace(t_start, t_end, steps + 1, dtype=torch.float32, device=x.device)
    logsnr_S = (objective.schedule if schedule is None else schedule)(t_S, shift=shift)
    a_S, b_S = (per_sample(scale_S) for scale_S in objective.scaling(logsnr_S))
    x0 = x
    for i in range(steps):
        logsnr_B = logsnr_S[i].expand(len(x))
        cond, uncond = predict(x, objective.noise_condition(logsnr_B))
        pred = cond.float()
        scale = _scale_at(guidance_scale, t_S[i])
        if scale is not None and uncond is not None:
            pred = apply_guidance(
                pred, uncond.float(), scale=scale, rescale=guidance_rescale, rescale_over=rescale_over
            )
        x0, eps = objective.x0(pred, x, logsnr_B), objective.predicted_noise(pred, x, logsnr_B)
        x = update(x0, eps, noise(), Scales(a=a_S[i], b=b_S[i], a_next=a_S[i + 1], b_next=b_S[i + 1]))
        if on_step is not None:
            on_step(SampleStep(x0=x0, x=x, pred=pred))
    return x0


def _check(
    steps: int, shift: float, rescale: float, rescale_over: str, t_start: float, t_end: float, sampler: str | Update
) -> None:
    check_above("steps", steps, 0)
    check_above("shift", shift, 0.0)
    check_within("guidance_rescale", rescale, 0.0, 1.0)
    check_choice("rescale_over", rescale_over, ("sample", "batch"))
    check_within("t_end", t_end, 0.0, 1.0)
    check_above("t_start", t_start, t_end)
    check_within("t_start", t_start, 0.0, 1.0)
    if isinstance(sampler, str):
        check_choice("sampler", sampler, tuple(UPDATES))


def _scale_at(guidance_scale: float | tuple[float, float] | None, t: Tensor) -> float | Tensor | None:
    if guidance_scale is None or isinstance(guidance_scale, int | float):
        return guidance_scale
    at_noise, at_data = guidance_scale
    return at_noise * t + at_data * (1 - t)
