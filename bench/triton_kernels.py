"""What the compiler makes of the response norm's Triton kernels: registers, spilled bytes and memory traffic.

    python bench/triton_kernels.py

Needs no GPU. The kernels are compiled for sm_80, sm_90 and sm_100 as a block of width 2048 launches them, in bf16 with
dropout. Traffic counts the loads and stores of global memory in the PTX, in bytes for each number of h.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` is a package of this checkout

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.soak import commit
from cascade_train.models.cascade.networks import response_norm as module
from cascade_train.models.cascade.networks import response_norm_triton as kernels

CAPABILITIES = (80, 90, 100)
KINDS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int16: "*i16", torch.bool: "*i1"}
WIDTH = 2048
TILE = kernels.ROWS * kernels.COLUMNS


def kind(argument: Tensor | float) -> str:
    """Return the type of an argument as triton names it."""
    if isinstance(argument, Tensor):
        return KINDS[argument.dtype]
    return "fp32" if isinstance(argument, float) else "constexpr" if argument == 1 else "i32"  # as triton does


@contextmanager
def compiled_only(capability: int) -> Iterator[list[Any]]:
    """Let launches compile their kernel for a device that is not there; yields what was compiled."""
    made: list[Any] = []

    def run(kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float, **flags: int) -> None:
        signature = dict(zip(kernel.arg_names, [*map(kind, arguments), *["constexpr"] * len(flags)], strict=True))
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | flags
        constants = {name: value for name, value in values.items() if signature[name] == "constexpr"}
        even = [i for i, each in enumerate(arguments) if isinstance(each, Tensor) or each % 16 == 0]
        attributes = {(place,): [["tt.divisibility", 16]] for place in even}  # as a launch marks them
        source = ASTSource(kernel, signature, constants, attributes)
        made.append(triton.compile(source, target=GPUTarget("cuda", capability, 32)))

    before = kernels._run, module._kernels
    kernels._run, module._kernels = run, lambda _: kernels  # type: ignore[assignment]
    try:
        yield made
    finally:
        kernels._run, module._kernels = before


def usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes that it spills to local memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def traffic(ptx: str) -> int:
    """Return the bytes that a thread loads from and stores to global memory, loops counted once."""
    total = 0
    for vector, bits in re.findall(r"(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)", ptx):
        total += int(vector or 1) * int(bits) // 8
    return total


def main() -> None:
    """Print the table in Markdown."""
    warnings.simplefilter("ignore")  # triton warns about its own defaults
    h, grad = (torch.randn(1, 24, 24, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    gamma, beta = (torch.randn(1, 1, 1, WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    sys.stdout.write(f"triton {triton.__version__}, commit {commit()}\n\n")
    sys.stdout.write(
        "| kernel | GPU | registers | spilled, bytes | bytes for each number of h |\n|---|---|---|---|---|\n"
    )
    for capability in CAPABILITIES:
        with compiled_only(capability) as made:
            out = module.response_norm(h.detach().requires_grad_(), gamma, beta, 0.1)
            torch.autograd.grad(out, [gamma, beta], grad)
        for each in made:
            registers, spilled = usage(each.asm["cubin"])
            threads = 32 * each.metadata.num_warps
            is_tiled = each.name not in ("_norms", "_slopes")
            share = f"{traffic(each.asm['ptx']) * threads / TILE:.2f}" if is_tiled else ""
            sys.stdout.write(f"| `{each.name}` | sm_{capability} | {registers} | {spilled} | {share} |\n")


if __name__ == "__main__":
    main()
