"""How work grows with its input, as a ratio within one process: no machine is too slow for it."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
FACTOR = 16
MOST = 4 * FACTOR
"""Of linear work some FACTOR; of quadratic work its square, which is 4 times this."""


def seconds(work: Callable[[T], object], value: T) -> float:
    """CPU seconds of the fastest of three tries; of one, where it is long."""
    tries = []
    for _ in range(3):
        began = time.process_time()
        work(value)
        tries.append(time.process_time() - began)
        if tries[-1] > 1:
            break
    return min(tries)


def assert_linear(work: Callable[[T], object], of_length: Callable[[int], T], length: int = 2**14) -> None:
    """Work on an input that is FACTOR times as long takes less than four times FACTOR as long."""
    short, long = (seconds(work, of_length(size)) for size in (length, FACTOR * length))
    assert long < MOST * short, f"{FACTOR} times the length takes {long / short:.0f} times the CPU seconds"
