"""Algorithms of the collection pytorch_optimizer, whose own constructors take and ignore any argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cascade_train.errors import install_hint

try:
    import pytorch_optimizer
except ModuleNotFoundError as error:
    raise ImportError(
        f"it needs the library pytorch_optimizer, which is not installed. {install_hint('optimizers')}"
    ) from error


class Lion(pytorch_optimizer.Lion):
    """The sign of a momentum, with one moment (Chen et al. 2023).

    Args:
        lr: learning rate, 3 to 10 times smaller than AdamW's.
        weight_decay: decoupled, 3 to 10 times larger than AdamW's.
        betas: of the update and of the momentum, in [0, 1).
        foreach: all tensors at once: fewer launches, more temporary memory.
    """

    by_element: ClassVar[bool] = True  # a rank can update its rows alone

    def __init__(
        self, params: Iterable[Any], *, lr: float, weight_decay: float = 0.0, betas: tuple[float, float], foreach: bool
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay, foreach=foreach)


class Came(pytorch_optimizer.CAME):
    """Factored second moments, with a momentum guided by its confidence (Luo et al. 2023).

    Args:
        betas: of the momentum, the squared gradients and the squared residuals, in [0, 1).
        clip_threshold: root mean square above which an update is scaled down.
        foreach: all tensors at once: fewer launches, more temporary memory.
    """

    needs_whole = True  # means of rows and columns

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float, float],
        clip_threshold: float,
        foreach: bool,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, weight_decay=weight_decay, clip_threshold=clip_threshold, foreach=foreach
        )


class Prodigy(pytorch_optimizer.Prodigy):
    """AdamW whose step size is estimated from the distance that the weights have gone (Mishchenko and Defazio 2024).

    Args:
        lr: factor on the estimated step size; 1.
        betas: of both moments, in [0, 1).
        eps: added to the denominator, times the estimate.
        d0: first estimate of the distance.
        d_coef: factor on the estimate.
        bias_correction: of the moments, as in AdamW.
        safeguard_warmup: leave the warmup of the learning rate out of the estimate.
        foreach: all tensors at once: fewer launches, more temporary memory.
    """

    needs_whole = True  # sums over all weights

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float],
        eps: float,
        d0: float,
        d_coef: float,
        bias_correction: bool,
        safeguard_warmup: bool,
        foreach: bool,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            betas=betas,
            eps=eps,
            d0=d0,
            d_coef=d_coef,
            bias_correction=bias_correction,
            safeguard_warmup=safeguard_warmup,
            foreach=foreach,
        )
        device = self.param_groups[0]["params"][0].device
        sums = {name: torch.zeros(1, device=device) for name in ("d_numerator", "d_de_nom")}
        for group in self.param_groups:  # from the start, so that a checkpoint always has them
            group.update(sums, d_hat=0.0)

    def estimate(self) -> float:
        """Estimate of the distance, which scales the learning rate."""
        return float(self.param_groups[0]["d"])


class ScheduleFreeAdamW(pytorch_optimizer.ScheduleFreeAdamW):
    """AdamW that averages its weights and needs no schedule (Defazio et al. 2024).

    It trains interpolations between the weights that it steps and their average; the result is the average.

    Args:
        lr: learning rate; constant after a warmup.
        weight_decay: of the interpolated weights.
        betas: of the interpolation, in (0, 1), and of the squared gradients, in [0, 1).
        eps: added to the denominator.
        r: power of the step in the weights of the average; 0 = all alike.
        weight_lr_power: power of the largest learning rate so far in them.
        foreach: all tensors at once: fewer launches, more temporary memory.
    """

    by_element: ClassVar[bool] = True  # a rank can update its rows alone
    is_schedule_free: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float],
        eps: float,
        r: float,
        weight_lr_power: float,
        foreach: bool,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            betas=betas,
            eps=eps,
            r=r,
            weight_lr_power=weight_lr_power,
            foreach=foreach,
        )

    @torch.no_grad()
    def averages(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter that was updated, and the average of its weights, a new tensor."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.state:
                    to_average = 1.0 - 1.0 / group["betas"][0]
                    yield parameter, parameter.detach().lerp(self.state[parameter]["z"], to_average)
