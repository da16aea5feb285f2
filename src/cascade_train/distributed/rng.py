"""Random numbers that are not about one sample (network dropout), as a function of the step.

Choices about a sample come from `cascade_train.batch.Batch`; nothing else draws from the global generators.
"""

from __future__ import annotations

import os

import torch

from cascade_train.batch import sample_seed


def seed_micro_batch(seed: int, *, step: int, micro: int, rank: int) -> None:
    """Seed torch's global generators for one micro-batch, so that resuming needs no generator state."""
    number = sample_seed(seed, step, micro, f"network/{rank}")
    torch.default_generator.manual_seed(number)  # torch.manual_seed() formats the stack for each device that is absent
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


def set_deterministic(enabled: bool) -> None:
    """Ask torch for deterministic kernels (slower on CUDA; the CPU path is deterministic either way).

    To be called before the first matrix product: cuBLAS takes its workspace from the environment then.
    """
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error" if enabled else "default")
    torch.backends.cudnn.benchmark = False  # it would time every kernel anew for each bucket's shape


def allow_tf32() -> None:
    """Round the inputs of fp32 matrix products to TF32 on CUDA devices, as the original does."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # of convolutions it is torch's default
