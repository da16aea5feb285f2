"""A program that calls this library as functions, such as a notebook, and keeps its own settings.

Lives here: what a training changes in its process, and how that is undone. What a call does stands in python.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore torch's random states, its switches and the garbage collector's as they were before the block.

    Switches: deterministic kernels, cuDNN's benchmark, the precision of fp32 products.
    """
    import torch  # takes seconds

    collects, products = gc.isenabled(), torch.backends.cuda.matmul
    kernels, precision = torch.get_deterministic_debug_mode(), products.fp32_precision
    benchmark = torch.backends.cudnn.benchmark
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    gc.enable()  # else a training takes this for a process of its own
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        torch.set_deterministic_debug_mode(kernels)
        products.fp32_precision = precision
        torch.backends.cudnn.benchmark = benchmark
        if not collects:
            gc.disable()
