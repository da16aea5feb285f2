"""Power-function EMA: step t of a training has weight t^exponent. How averages are kept, and others built from them.

The length of such an average is the standard deviation of its weights over the steps taken, sigma_rel (Karras et al.
2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3 and appendix C).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def exponent_of(length: float) -> float:
    """Exponent of an average of a length in (0, 12^-1/2), 0 or more (equation 126, algorithm 2)."""
    inverse = length**-2.0
    return float(np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse]).real.max())


def decay_at(exponent: float, step: int) -> float:
    """Weight of the old average in the update after a step (equation 127)."""
    return float((1.0 - 1.0 / step) ** (exponent + 1.0))


def solve(kept: Sequence[tuple[int, float]], step: int, length: float) -> tuple[list[float], float]:
    """Coefficients for kept averages, given by step and length, whose sum is nearest to another, and the error.

    The error is the L2 norm of the difference of the two profiles, relative to the one asked for (algorithm 3).
    """
    if (step, length) in kept:
        return [float(each == (step, length)) for each in kept], 0.0
    pairs = [(float(at), exponent_of(each)) for at, each in (*kept, (step, length))]
    products = _inner_products(np.array(pairs))
    between, wanted, norm = products[:-1, :-1], products[:-1, -1], products[-1, -1]
    solution = np.linalg.lstsq(between, wanted, rcond=None)[0]
    solution /= solution.sum()
    squared = norm - 2.0 * solution @ wanted + solution @ between @ solution
    return solution.tolist(), float(np.sqrt(max(squared, 0.0) / norm))


def _inner_products(profiles_N2: NDArray[np.float64]) -> NDArray[np.float64]:
    """Inner products (N, N) of the profiles of averages, given by step and exponent (equation 151)."""
    step_N, exponent_N = profiles_N2.T
    step_N1, exponent_N1 = profiles_N2.T[:, :, None]
    ratio = np.minimum(step_N1, step_N) / np.maximum(step_N1, step_N)
    of_later = np.where(step_N1 < step_N, exponent_N, exponent_N1)
    scale = (exponent_N1 + 1.0) * (exponent_N + 1.0) / (exponent_N1 + exponent_N + 1.0)
    products: NDArray[np.float64] = scale * ratio**of_later / np.maximum(step_N1, step_N)
    return products
