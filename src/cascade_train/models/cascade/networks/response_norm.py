"""GELU, global response norm and dropout of a residual block as one operator with a closed-form backward.

g = GELU(h), n = |g| over height and width, s = n / (mean of n over channels + eps), out = dropout(g (1 + gamma s) +
beta): Woo et al. 2023, ConvNeXt V2, and Stable Cascade, modules/common.py. Backward keeps h and reads out, which the
next linear layer keeps anyway: 11 tensors of a block's size where autograd keeps 19. What dropout zeroes is -0.0 in
out, and no sum with a bias gives that, so that no mask is kept.

Shape legend: B batch, H W latent size, K channels, four times the block's width.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.library import Library, register_fake

from cascade_train.files.package import without_siblings

with without_siblings("diffusers.models.unets"):
    from diffusers.models.unets.unet_stable_cascade import SDCascadeResBlock

EPSILON = 1e-6
_HAS_TRITON = find_spec("triton") is not None
_SPACE = (1, 2)
_LIBRARY = Library("cascade_train", "FRAGMENT")
_LIBRARY.define("response_norm(Tensor h, Tensor gamma, Tensor beta, float p) -> (Tensor, Tensor)")
_LIBRARY.define(
    "response_norm_backward(Tensor grad, Tensor h, Tensor? out, Tensor gamma, Tensor norm, float p)"
    " -> (Tensor, Tensor, Tensor)"
)


Kernels = Literal["eager", "fused"]


def set_kernels(network: nn.Module, name: Kernels) -> None:
    """Choose what the residual blocks below `network` run, in place; names of parameters stay."""
    kind = FusedChannelwise if name == "fused" else nn.Sequential
    for block in network.modules():
        if isinstance(block, SDCascadeResBlock):
            block.channelwise = kind(*block.channelwise)


class FusedChannelwise(nn.Sequential):
    """The linear, GELU, response norm, dropout and linear layers of a residual block, the middle three at once."""

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C')."""
        first, _, norm, dropout, last = self
        p = dropout.p if dropout.training else 0.0
        return last(response_norm(first(x_BHWC), norm.gamma, norm.beta, p))


def response_norm(h_BHWK: Tensor, gamma_K: Tensor, beta_K: Tensor, p: float = 0.0) -> Tensor:
    """Return dropout of probability `p` of the response norm of GELU(h), (B, H, W, K).

    On a CPU dropout draws the numbers of `nn.Dropout`. `gamma` and `beta` are (1, 1, 1, K).
    """
    return _ResponseNorm.apply(h_BHWK, gamma_K, beta_K, p)


class _ResponseNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_BHWK: Tensor, gamma_K: Tensor, beta_K: Tensor, p: float) -> Tensor:
        h_BHWK = h_BHWK.contiguous()
        out_BHWK, norm_BK = torch.ops.cascade_train.response_norm(h_BHWK, gamma_K, beta_K, p)
        ctx.save_for_backward(h_BHWK, out_BHWK if p > 0 else None, gamma_K, norm_BK)
        ctx.p = p
        return out_BHWK

    @staticmethod
    def backward(ctx: Any, grad_BHWK: Tensor) -> tuple[Tensor | None, ...]:
        operator = torch.ops.cascade_train.response_norm_backward
        return *operator(grad_BHWK.contiguous(), *ctx.saved_tensors, ctx.p), None


def _kernels(h_BHWK: Tensor) -> Any:
    """Return the module of kernels for a tensor, None where torch does it."""
    if not (_HAS_TRITON and h_BHWK.is_cuda and h_BHWK.dtype != torch.float64):
        return None
    from cascade_train.models.cascade.networks import response_norm_triton

    return response_norm_triton


def factors(gamma_K: Tensor, norm_BK: Tensor, p: float) -> Tensor:
    """Return by what GELU(h) is multiplied, (B, 1, 1, K) in the dtype of `norm`."""
    return (1 + gamma_K.to(norm_BK.dtype) * _relative(norm_BK)) / (1 - p)


def norm_gradient(sum_BK: Tensor, gamma_K: Tensor, norm_BK: Tensor) -> Tensor:
    """Return the gradient of the norms over the norms, (B, 1, 1, K); `sum` is that of gradient times GELU(h)."""
    mean_B = norm_BK.mean(-1, keepdim=True) + EPSILON
    slope_BK = gamma_K.to(norm_BK.dtype) * sum_BK
    grad_BK = slope_BK / mean_B - (slope_BK * norm_BK).mean(-1, keepdim=True) / mean_B.square()
    return torch.where(norm_BK > 0, grad_BK / norm_BK, 0)


def _bits(out_BHWK: Tensor) -> Tensor:
    return out_BHWK.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[out_BHWK.element_size()])


def _relative(norm_BK: Tensor) -> Tensor:
    return norm_BK / (norm_BK.mean(-1, keepdim=True) + EPSILON)


def _forward(h_BHWK: Tensor, gamma_K: Tensor, beta_K: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return the output, and the norms (B, 1, 1, K), fp32 at least."""
    kept = torch.empty_like(h_BHWK, dtype=torch.bool).bernoulli_(1 - p) if p > 0 else None
    if kernels := _kernels(h_BHWK):
        out_BHWK = torch.empty_like(h_BHWK)
        return out_BHWK, kernels.forward(h_BHWK, gamma_K, beta_K, kept, _bits(out_BHWK), p, EPSILON)
    g_BHWK = nn.functional.gelu(h_BHWK)
    out_BHWK = g_BHWK * g_BHWK  # sums over space are several times faster than a vector norm
    precise = torch.promote_types(h_BHWK.dtype, torch.float32)
    norm_BK = out_BHWK.sum(_SPACE, keepdim=True, dtype=precise).sqrt_()
    shift_K = beta_K / (1 - p) + 0.0  # -0.0 becomes 0.0, since -0.0 in the output marks what dropout zeroed
    torch.addcmul(shift_K, g_BHWK, factors(gamma_K, norm_BK, p).to(h_BHWK.dtype), out=out_BHWK)
    return out_BHWK if kept is None else out_BHWK.masked_fill_(kept.logical_not_(), -0.0), norm_BK


def _backward(
    grad_BHWK: Tensor, h_BHWK: Tensor, out_BHWK: Tensor | None, gamma_K: Tensor, norm_BK: Tensor, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of h, gamma and beta."""
    bits = None if out_BHWK is None else _bits(out_BHWK)
    if kernels := _kernels(h_BHWK):
        return kernels.backward(grad_BHWK, h_BHWK, bits, gamma_K, norm_BK, p, EPSILON)
    if bits is not None:
        grad_BHWK = grad_BHWK * (bits != torch.iinfo(bits.dtype).min)
    g_BHWK = nn.functional.gelu(h_BHWK)
    product_BHWK = grad_BHWK * g_BHWK
    sums = (x.sum(_SPACE, keepdim=True, dtype=norm_BK.dtype) for x in (product_BHWK, grad_BHWK))
    sum_BK, total_BK = (x / (1 - p) for x in sums)
    straight_BK, through_BK = factors(gamma_K, norm_BK, p), norm_gradient(sum_BK, gamma_K, norm_BK)
    torch.mul(grad_BHWK, straight_BK.to(h_BHWK.dtype), out=product_BHWK)
    product_BHWK.addcmul_(g_BHWK, through_BK.to(h_BHWK.dtype))
    grad_h_BHWK = torch.ops.aten.gelu_backward(product_BHWK, h_BHWK)
    grad_gamma_K = (_relative(norm_BK) * sum_BK).sum(0, keepdim=True)
    return grad_h_BHWK, grad_gamma_K.to(gamma_K.dtype), total_BK.sum(0, keepdim=True).to(gamma_K.dtype)


_LIBRARY.impl("response_norm", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("response_norm_backward", _backward, "CompositeExplicitAutograd")


@register_fake("cascade_train::response_norm")
def _forward_shapes(h_BHWK: Tensor, gamma_K: Tensor, beta_K: Tensor, p: float) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(h_BHWK.dtype, torch.float32)
    return torch.empty_like(h_BHWK), h_BHWK.new_empty((h_BHWK.shape[0], 1, 1, h_BHWK.shape[-1]), dtype=dtype)


@register_fake("cascade_train::response_norm_backward")
def _backward_shapes(
    grad_BHWK: Tensor, h_BHWK: Tensor, out_BHWK: Tensor | None, gamma_K: Tensor, norm_BK: Tensor, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(h_BHWK), torch.empty_like(gamma_K), torch.empty_like(gamma_K)
