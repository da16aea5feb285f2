"""Triton kernels of the response norm: two passes over the channels forward, two backward, sums in fp32.

A program handles `ROWS` positions times `COLUMNS` channels of one sample; sums over positions are those of programs,
added by torch, so that they do not depend on the order in which programs run. What dropout zeroes has the bits of
-0.0: `bits` are those of the output.

Shape legend: B batch, H W latent size, K channels.
"""

# ruff: noqa: ANN001, ANN202, N803 -- kernels are written in triton's language
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 64


def square_sums(h_BHWK: Tensor) -> Tensor:
    """Return the sum of GELU(h)^2 over height and width, (B, 1, 1, K) fp32."""
    parts, grid, sizes = _partial(h_BHWK)
    _square_sums[grid](h_BHWK, parts, *sizes, ROWS, COLUMNS)
    return parts.sum(1)[:, None, None]


def apply(h_BHWK: Tensor, factor_BK: Tensor, shift_K: Tensor, dropped_BHWK: Tensor | None) -> Tensor:
    """Return GELU(h) * factor + shift, -0.0 where `dropped`, a bool tensor, is true."""
    out_BHWK = torch.empty_like(h_BHWK)
    bits = out_BHWK.view(_integers(h_BHWK))
    drops, dropped = dropped_BHWK is not None, h_BHWK if dropped_BHWK is None else dropped_BHWK
    _, grid, sizes = _partial(h_BHWK)
    lowest = torch.iinfo(bits.dtype).min
    _apply[grid](h_BHWK, factor_BK, shift_K, dropped, bits, *sizes, drops, lowest, ROWS, COLUMNS)
    return out_BHWK


def gradient_sums(grad_BHWK: Tensor, h_BHWK: Tensor, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sums of grad * GELU(h), and of grad, over height and width, (B, 1, 1, K) fp32 each."""
    products, grid, sizes = _partial(h_BHWK)
    totals = torch.empty_like(products)
    mask = _mask(bits, h_BHWK)
    _gradient_sums[grid](grad_BHWK, h_BHWK, mask[0], products, totals, *sizes, *mask[1:], ROWS, COLUMNS)
    return products.sum(1)[:, None, None], totals.sum(1)[:, None, None]


def apply_backward(
    grad_BHWK: Tensor, h_BHWK: Tensor, bits: Tensor | None, straight_BK: Tensor, through_BK: Tensor
) -> Tensor:
    """Return (grad * straight + GELU(h) * through) * GELU'(h), the gradient of h."""
    grad_h_BHWK = torch.empty_like(h_BHWK)
    _, grid, sizes = _partial(h_BHWK)
    mask = _mask(bits, h_BHWK)
    arguments = (grad_BHWK, h_BHWK, mask[0], straight_BK, through_BK, grad_h_BHWK)
    _apply_backward[grid](*arguments, *sizes, *mask[1:], ROWS, COLUMNS)
    return grad_h_BHWK


def _partial(h_BHWK: Tensor) -> tuple[Tensor, tuple[int, int, int], tuple[int, int, int]]:
    """Return memory for the programs' sums (B, programs, K), the grid, and the sizes (positions, K, programs)."""
    batch, height, width, channels = h_BHWK.shape
    rows = height * width
    blocks = triton.cdiv(rows, ROWS)
    parts = h_BHWK.new_empty((batch, blocks, channels), dtype=torch.float32)
    return parts, (triton.cdiv(channels, COLUMNS), blocks, batch), (rows, channels, blocks)


def _integers(x: Tensor) -> torch.dtype:
    return torch.int16 if x.element_size() == 2 else torch.int32


def _mask(bits: Tensor | None, h_BHWK: Tensor) -> tuple[Tensor, bool, int]:
    """Return what the kernels read of the output's bits: a pointer, whether to read it, and the bits of -0.0."""
    return (h_BHWK, False, 0) if bits is None else (bits, True, torch.iinfo(bits.dtype).min)


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_slope(x):
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327


@triton.jit
def _places(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the columns, their condition, the tile's offsets and its condition."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    sample = tl.program_id(2).to(tl.int64) * rows * width
    exists = column < width
    offset = sample + row[:, None].to(tl.int64) * width + column[None, :]
    return column, exists, offset, (row[:, None] < rows) & exists[None, :]


@triton.jit
def _part(width, blocks, column):
    """Return where this program's sums belong in (B, programs, K)."""
    return (tl.program_id(2) * blocks + tl.program_id(1)) * width + column


@triton.jit
def _square_sums(h, parts, rows, width, blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column, exists, offset, inside = _places(rows, width, ROWS, COLUMNS)
    g = _gelu(tl.load(h + offset, inside, 0.0).to(tl.float32))
    tl.store(parts + _part(width, blocks, column), tl.sum(g * g, 0), exists)


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
def _gradient(grad, bits, offset, inside, DROPS: tl.constexpr, LOWEST: tl.constexpr):
    d = tl.load(grad + offset, inside, 0.0).to(tl.float32)
    if DROPS:
        d = tl.where(tl.load(bits + offset, inside, 0) == LOWEST, 0.0, d)
    return d


@triton.jit
def _gradient_sums(
    grad, h, bits, products, totals, rows, width, blocks,
    DROPS: tl.constexpr, LOWEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, exists, offset, inside = _places(rows, width, ROWS, COLUMNS)
    d = _gradient(grad, bits, offset, inside, DROPS, LOWEST)
    g = _gelu(tl.load(h + offset, inside, 0.0).to(tl.float32))
    part = _part(width, blocks, column)
    tl.store(products + part, tl.sum(d * g, 0), exists)
    tl.store(totals + part, tl.sum(d, 0), exists)


@triton.jit
def _apply_backward(
    grad, h, bits, straight, through, grad_h, rows, width, blocks,
    DROPS: tl.constexpr, LOWEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, exists, offset, inside = _places(rows, width, ROWS, COLUMNS)
    d = _gradient(grad, bits, offset, inside, DROPS, LOWEST)
    x = tl.load(h + offset, inside, 0.0).to(tl.float32)
    place = tl.program_id(2) * width + column
    a, b = tl.load(straight + place, exists, 0.0), tl.load(through + place, exists, 0.0)
    slope = (d * a[None, :] + _gelu(x) * b[None, :]) * _gelu_slope(x)
    tl.store(grad_h + offset, slope.to(grad_h.dtype.element_ty), inside)
