"""Triton kernels of the response norm: two passes over the channels forward, two backward, sums in fp32.

A program handles `ROWS` positions times `COLUMNS` channels of one sample; torch adds the programs' sums, so that they
do not depend on the order in which programs run. Between the passes one program per sample takes the means over its
channels; everything else of size K is computed where it is read, since small batches are bound by launches: 4 forward,
the mask of dropout apart, and 4 backward. `bits` are the output's: those of -0.0 where dropout zeroed it.

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
CHUNK = 2048
"""Channels that the program of a sample reads at once."""


def forward(
    h_BHWK: Tensor, gamma_K: Tensor, beta_K: Tensor, kept_BHWK: Tensor | None, bits: Tensor, p: float, epsilon: float
) -> Tensor:
    """Write the bits of the output, of -0.0 where `kept`, a bool tensor, is false; return norms (B, 1, 1, K) fp32."""
    (norm_BK,) = _sums(_square_sums, h_BHWK, 1)
    mean_B = norm_BK.new_empty(len(h_BHWK))
    _run(_norms, (len(h_BHWK),), norm_BK, mean_B, h_BHWK.shape[-1], EPSILON=epsilon, CHUNK=CHUNK)
    kept = h_BHWK if kept_BHWK is None else kept_BHWK
    flags = {"DROPS": kept_BHWK is not None, "LOWEST": torch.iinfo(bits.dtype).min}
    _pass(_apply, h_BHWK, gamma_K, beta_K, norm_BK, mean_B, kept, bits, 1 - p, **flags)
    return norm_BK


def backward(
    grad_BHWK: Tensor, h_BHWK: Tensor, bits: Tensor | None, gamma_K: Tensor, norm_BK: Tensor, p: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of h, gamma and beta."""
    marks = h_BHWK if bits is None else bits
    flags = {"DROPS": bits is not None, "LOWEST": 0 if bits is None else torch.iinfo(bits.dtype).min}
    sums = _sums(_gradient_sums, h_BHWK, 2, grad_BHWK, marks, **flags)
    means = norm_BK.new_empty(2, len(h_BHWK))
    scalars = {"EPSILON": epsilon, "CHUNK": CHUNK}
    _run(_slopes, (len(h_BHWK),), norm_BK, sums, gamma_K, means, 1 - p, h_BHWK.shape[-1], **scalars)
    gradients = torch.empty_like(h_BHWK), torch.empty_like(gamma_K), torch.empty_like(gamma_K)
    _pass(_apply_backward, h_BHWK, grad_BHWK, marks, gamma_K, norm_BK, sums, means, *gradients, 1 - p, **flags)
    return gradients


def _sums(kernel: Any, h_BHWK: Tensor, count: int, *tensors: Tensor, **flags: Any) -> Tensor:
    """Run a kernel over h that sums over height and width, and return the sums, (count, B, 1, 1, K) fp32."""
    batch, height, width, channels = h_BHWK.shape
    blocks = triton.cdiv(height * width, ROWS)
    parts = h_BHWK.new_empty((count, batch, blocks, channels), dtype=torch.float32)
    _pass(kernel, h_BHWK, *tensors, parts, **flags)
    return parts.sum(2)[:, :, None, None]


def _pass(kernel: Any, h_BHWK: Tensor, *arguments: Any, **flags: Any) -> None:
    """Run a kernel over h, in tiles of `ROWS` positions times `COLUMNS` channels."""
    batch, height, width, channels = h_BHWK.shape
    grid = triton.cdiv(channels, COLUMNS), triton.cdiv(height * width, ROWS), batch
    _run(kernel, grid, h_BHWK, *arguments, height * width, channels, **flags, ROWS=ROWS, COLUMNS=COLUMNS)


def _run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **flags: Any) -> None:
    """Launch a kernel; every launch passes here."""
    kernel[grid](*arguments, **flags)


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
def _factors(gamma, norm, mean, keep, width, column, exists):
    """Return gamma, the norms and their mean, and by what GELU(h) is multiplied, of the program's columns."""
    g = tl.load(gamma + column, exists, 0.0).to(tl.float32)
    n = tl.load(norm + tl.program_id(2) * width + column, exists, 0.0)
    m = tl.load(mean + tl.program_id(2))
    return g, n, m, (1.0 + g * (n / m)) / keep


@triton.jit
def _part(column, width):
    """Return where the program's sums lie among all programs'."""
    return (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * width + column


@triton.jit
def _square_sums(h, parts, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column, exists, offset, inside = _places(rows, width, ROWS, COLUMNS)
    g = _gelu(tl.load(h + offset, inside, 0.0).to(tl.float32))
    tl.store(parts + _part(column, width), tl.sum(g * g, 0), exists)


@triton.jit
def _norms(norm, mean, width, EPSILON: tl.constexpr, CHUNK: tl.constexpr):
    """Take the root of a sample's sums, in place, and their mean plus EPSILON."""
    row = norm + tl.program_id(0) * width
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        n = tl.sqrt_rn(tl.load(row + column, column < width, 0.0))
        tl.store(row + column, n, column < width)
        total += n
    tl.store(mean + tl.program_id(0), tl.sum(total, 0) / width + EPSILON)


@triton.jit
def _apply(
    h, gamma, beta, norm, mean, kept, bits, keep, rows, width,
    DROPS: tl.constexpr, LOWEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, exists, offset, inside = _places(rows, width, ROWS, COLUMNS)
    x = tl.load(h + offset, inside, 0.0)
    _, _, _, scale = _factors(gamma, norm, mean, keep, width, column, exists)
    shift = tl.load(beta + column, exists, 0.0).to(tl.float32) / keep
    y = _gelu(x.to(tl.float32)) * scale[None, :] + shift[None, :]
    y = tl.where(y == 0.0, 0.0, y).to(x.dtype).to(bits.dtype.element_ty, bitcast=True)
    if DROPS:
        y = tl.where(tl.load(kept + offset, inside, 0) == 0, LOWEST, y).to(bits.dtype.element_ty)
    tl.store(bits + offset, y, inside)


@triton.jit
def _gradient_sums(
    h, grad, bits, parts, rows, width,
    DROPS: tl.constexpr, LOWEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum grad * GELU(h), and grad."""
    column, exists, offset, inside = _places(rows, width, ROWS, COLUMNS)
    d = _gradient(grad, bits, offset, inside, DROPS, LOWEST)
    g = _gelu(tl.load(h + offset, inside, 0.0).to(tl.float32))
    place = parts + _part(column, width)
    tl.store(place, tl.sum(d * g, 0), exists)
    tl.store(place + tl.num_programs(2) * tl.num_programs(1) * width, tl.sum(d, 0), exists)


@triton.jit
def _slopes(norm, sums, gamma, means, keep, width, EPSILON: tl.constexpr, CHUNK: tl.constexpr):
    """Take a sample's means of the norms, plus EPSILON, and of gamma times their product with the sums."""
    row = tl.program_id(0) * width
    total, slopes = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        n = tl.load(norm + row + column, column < width, 0.0)
        s = tl.load(sums + row + column, column < width, 0.0)
        total += n
        slopes += tl.load(gamma + column, column < width, 0.0).to(tl.float32) * s * n
    tl.store(means + tl.program_id(0), tl.sum(total, 0) / width + EPSILON)
    tl.store(means + tl.num_programs(0) + tl.program_id(0), tl.sum(slopes, 0) / width / keep)


@triton.jit
def _apply_backward(
    h, grad, bits, gamma, norm, sums, means, grad_h, grad_gamma, grad_beta, keep, rows, width,
    DROPS: tl.constexpr, LOWEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write (grad * a + GELU(h) * b) * GELU'(h); the first programs of all columns, the gradients of gamma and beta."""
    column, exists, offset, inside = _places(rows, width, ROWS, COLUMNS)
    d = _gradient(grad, bits, offset, inside, DROPS, LOWEST)
    x = tl.load(h + offset, inside, 0.0).to(tl.float32)
    samples = tl.num_programs(2)
    g, n, m, a = _factors(gamma, norm, means, keep, width, column, exists)
    s = tl.load(sums + tl.program_id(2) * width + column, exists, 0.0) / keep
    through = g * s / m - tl.load(means + samples + tl.program_id(2)) / (m * m)
    b = tl.where(n > 0.0, through / tl.where(n > 0.0, n, 1.0), 0.0)
    slope = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    tl.store(grad_h + offset, ((d * a[None, :] + _gelu(x) * b[None, :]) * slope).to(grad_h.dtype.element_ty), inside)
    if tl.program_id(1) + tl.program_id(2) == 0:
        products, totals = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
        for sample in range(samples):
            place = sample * width + column
            ratio = tl.load(norm + place, exists, 0.0) / tl.load(means + sample)
            products += ratio * tl.load(sums + place, exists, 0.0)
            totals += tl.load(sums + samples * width + place, exists, 0.0)
        tl.store(grad_gamma + column, (products / keep).to(grad_gamma.dtype.element_ty), exists)
        tl.store(grad_beta + column, (totals / keep).to(grad_beta.dtype.element_ty), exists)
