"""Triton kernels of the response norm: two passes over the channels forward, two backward, sums in fp32.

A program handles `ROWS` positions times `COLUMNS` channels of one sample; torch adds the programs' sums, so that they
do not depend on the order in which programs run. `bits` are the output's: those of -0.0 where dropout zeroed it.

Shape legend: B batch, H W latent size, K channels.
"""

# ruff: noqa: ANN001, ANN202, N803 -- kernels are written in triton's language
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 64


def square_sums(h_BHWK: Tensor) -> Tensor:
    """Return the sum of GELU(h)^2 over height and width, (B, 1, 1, K) fp32."""
    return _launch(_square_sums, h_BHWK, sums=1)[0]


def apply(h_BHWK: Tensor, factor_BK: Tensor, shift_K: Tensor, dropped_BHWK: Tensor | None, bits: Tensor) -> None:
    """Write the bits of GELU(h) * factor + shift, or of -0.0 where `dropped`, a bool tensor, is true."""
    dropped = h_BHWK if dropped_BHWK is None else dropped_BHWK
    flags = {"DROPS": dropped_BHWK is not None, "LOWEST": torch.iinfo(bits.dtype).min}
    _launch(_apply, h_BHWK, factor_BK, shift_K, dropped, bits, **flags)


def gradient_sums(grad_BHWK: Tensor, h_BHWK: Tensor, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sums of grad * GELU(h), and of grad, over height and width, (B, 1, 1, K) fp32 each."""
    products, totals = _launch(_gradient_sums, h_BHWK, grad_BHWK, *_marks(h_BHWK, bits), sums=2, **_flags(bits))
    return products, totals


def apply_backward(
    grad_BHWK: Tensor, h_BHWK: Tensor, bits: Tensor | None, straight_BK: Tensor, through_BK: Tensor
) -> Tensor:
    """Return (grad * straight + GELU(h) * through) * GELU'(h), the gradient of h."""
    grad_h_BHWK = torch.empty_like(h_BHWK)
    tensors = (grad_BHWK, *_marks(h_BHWK, bits), straight_BK, through_BK, grad_h_BHWK)
    _launch(_apply_backward, h_BHWK, *tensors, **_flags(bits))
    return grad_h_BHWK


def _marks(h_BHWK: Tensor, bits: Tensor | None) -> tuple[Tensor]:
    return (h_BHWK if bits is None else bits,)


def _flags(bits: Tensor | None) -> dict[str, Any]:
    return {"DROPS": bits is not None, "LOWEST": 0 if bits is None else torch.iinfo(bits.dtype).min}


def _launch(kernel: Any, h_BHWK: Tensor, *tensors: Tensor, sums: int = 0, **flags: Any) -> list[Tensor]:
    """Run a kernel over h, and return K sums over height and width, (B, 1, 1, K) fp32."""
    batch, height, width, channels = h_BHWK.shape
    blocks = triton.cdiv(height * width, ROWS)
    parts = [h_BHWK.new_empty((batch, blocks, channels), dtype=torch.float32) for _ in range(sums)]
    grid = (triton.cdiv(channels, COLUMNS), blocks, batch)
    kernel[grid](h_BHWK, *tensors, *parts, height * width, channels, blocks, **flags, ROWS=ROWS, COLUMNS=COLUMNS)
    return [part.sum(1)[:, None, None] for part in parts]


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _places(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the columns, their condition, the tile's offsets and its condition."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(2).to(tl.int64) * rows * width
    offset = start + row[:, None].to(tl.int64) * width + column[None, :]
    return column, column < width, offset, (row < rows)[:, None] & (column < width)[None, :]


@triton.jit
def _gradient(grad, bits, offset, inside, DROPS: tl.constexpr, LOWEST: tl.constexpr):
    d = tl.load(grad + offset, inside, 0.0).to(tl.float32)
    if DROPS:
        d = tl.where(tl.load(bits + offset, inside, 0) == LOWEST, 0.0, d)
    return d


@triton.jit
def _square_sums(h, parts, rows, width, blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column, exists, offset, inside = _places(rows, width, ROWS, COLUMNS)
    g = _gelu(tl.load(h + offset, inside, 0.0).to(tl.float32))
    tl.store(parts + (tl.program_id(2) * blocks + tl.program_id(1)) * width + column, tl.sum(g * g, 0), exists)


@triton.jit
def _apply(
    h, factor, shift, dropped, bits, rows, width, blocks,
    DROPS: tl.constexpr, LOWEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, exists, offset, inside = _places(rows, width, ROWS, COLUMNS)
    x = tl.load(h + offset, inside, 0.0)
    scale = tl.load(factor + tl.program_id(2) * width + column, exists, 0.0)
    y = _gelu(x.to(tl.float32)) * scale[None, :] + tl.load(shift + column, exists, 0.0).to(tl.float32)[None, :]
    y = tl.where(y == 0.0, 0.0, y).to(x.dtype).to(bits.dtype.element_ty, bitcast=True)
    if DROPS:
        y = tl.where(tl.load(dropped + offset, inside, 0) != 0, LOWEST, y).to(bits.dtype.element_ty)
    tl.store(bits + offset, y, inside)


@triton.jit
def _gradient_sums(
    h, grad, bits, products, totals, rows, width, blocks,
    DROPS: tl.constexpr, LOWEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, exists, offset, inside = _places(rows, width, ROWS, COLUMNS)
    d = _gradient(grad, bits, offset, inside, DROPS, LOWEST)
    g = _gelu(tl.load(h + offset, inside, 0.0).to(tl.float32))
    place = (tl.program_id(2) * blocks + tl.program_id(1)) * width + column
    tl.store(products + place, tl.sum(d * g, 0), exists)
    tl.store(totals + place, tl.sum(d, 0), exists)


@triton.jit
def _apply_backward(
    h, grad, bits, straight, through, grad_h, rows, width, blocks,
    DROPS: tl.constexpr, LOWEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, exists, offset, inside = _places(rows, width, ROWS, COLUMNS)
    d = _gradient(grad, bits, offset, inside, DROPS, LOWEST)
    x = tl.load(h + offset, inside, 0.0).to(tl.float32)
    place = tl.program_id(2) * width + column
    a, b = tl.load(straight + place, exists, 0.0), tl.load(through + place, exists, 0.0)
    slope = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    tl.store(grad_h + offset, ((d * a[None, :] + _gelu(x) * b[None, :]) * slope).to(grad_h.dtype.element_ty), inside)
