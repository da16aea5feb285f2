"""Computed memory of a training step beside what the step takes: of this process, and of its tensors.

    python bench/memory.py --out bench/results/memory.md

Each case is a process of its own, which trains three steps on the CPU. `process` is what the second step adds to the
memory of the process (the kernel's high-water mark, set back before it), `tensors` what the third adds, by recording
each storage. Computed is what `cascade-train plan` knows, less what is held between steps. Ends with 1 where computed
and process differ by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `bench` and `tests` are packages of this checkout

WIDE = (
    *("model=c_tiny", "model.weights=null", "model.image_size=512", "data=shapes", "data.num_workers=0"),
    *("model.network.block_out_channels=[384,384]", "model.network.num_attention_heads=[6,6]"),
    *(
        "sample.every_steps=null",
        "checkpoint.every_steps=null",
        "train.max_steps=3",
        "model.semantic_compressor.weights=null",
    ),
)
CASES = {
    "fp32, batch 4": ("task=finetune", "train.global_batch_size=4"),
    "fp32, batch 16": ("task=finetune", "train.global_batch_size=16"),
    "fp32, batch 16, checkpointed": ("task=finetune", "train.global_batch_size=16", "activation_checkpointing=true"),
    "fp32, batch 16 in 4, average": (
        *("task=finetune", "train.global_batch_size=16", "train.micro_batch_size=4", "ema.decay=0.9"),
    ),
    "bf16, batch 16": ("task=finetune", "train.global_batch_size=16", "train.precision=bf16"),
    "bf16, batch 16, checkpointed": (
        *("task=finetune", "train.global_batch_size=16", "train.precision=bf16", "activation_checkpointing=true"),
    ),
    "LoRA, bf16, batch 16": ("task=lora", "train.global_batch_size=16", "train.precision=bf16"),
}
HELD = "held between steps"
MOST_OFF = 0.1
"""Share by which computed and measured may differ."""

HOST = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Lets the C library give back to the kernel what tensors free."""


def status(name: str) -> int:
    """Return a figure of this process's memory in bytes, as the kernel counts it."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def be_case(name: str, out: Path) -> None:
    """Train a case in this process, and write what its steps take."""
    import torch

    from cascade_train.__main__ import launch
    from cascade_train.assembly.planning.allocations import Allocations
    from cascade_train.assembly.planning.memory import memory_of
    from cascade_train.assembly.planning.memory_trace import AVERAGE, COPIES, ENCODERS, OPTIMIZER, WEIGHTS
    from cascade_train.engine.loop import Trainer
    from tests.unit.assembly.planning.test_memory import holdings
    from tests.unit.config.composing import checked

    torch.set_num_threads(1)
    found: dict[str, float] = {}
    train_step = Trainer.train_step

    def looking(self: Trainer, micro_batches: Any) -> Any:
        if self.step == 1:
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
            made = train_step(self, micro_batches)
            found["process"] = status("VmHWM") - before
            return made
        if self.step == 2:
            with Allocations() as allocations:
                allocations.label = HELD
                allocations.record(holdings(self))  # else views of weights would count as new
                allocations.label, begin = "step", allocations.tick
                made = train_step(self, micro_batches)
            curves = allocations.curves(begin)
            found["tensors"] = float((sum(curves.values()) - curves[HELD][0]).max())
            return made
        return train_step(self, micro_batches)

    Trainer.train_step = looking  # type: ignore[method-assign]
    assert launch([*WIDE, *CASES[name], f"run.dir={out.with_suffix('')}"]) == 0
    cfg = checked(*WIDE, *CASES[name])
    memory, _ = memory_of(cfg, on_cuda=False)
    micro = cfg.train.micro_batch_size
    peak = memory.peak(micro, cfg.train.global_batch_size // micro)
    held = sum(peak.get(part, 0) for part in (WEIGHTS, ENCODERS, OPTIMIZER, AVERAGE, COPIES))
    out.write_text(json.dumps({**found, "computed": sum(peak.values()) - held, "held": held}))


def measure() -> dict[str, dict[str, float]]:
    """Return what each case measured, in processes of their own."""
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        for number, name in enumerate(CASES):
            out = Path(directory) / f"{number}.json"
            environment = {**os.environ, **HOST, "OMP_NUM_THREADS": "1"}
            environment["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
            subprocess.run([sys.executable, __file__, "--case", name, "--out", str(out)], env=environment, check=True)
            results[name] = json.loads(out.read_text())
    return results


def page(results: dict[str, dict[str, float]]) -> str:
    """Page of the results."""
    from bench.soak import commit

    lines = [
        "# Memory: computed beside measured",
        "",
        f"`python bench/memory.py`, {datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {platform.machine()} CPU.",
        "MB (10^6 bytes) that a step adds to what is held between steps, which is the last column. Stage C, width 384,",
        "16 x 16 latents, 8 units.",
        "",
        "| case | process | tensors | computed | computed / process | computed / tensors | held |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in results.items():
        figures = " | ".join(f"{each[key] / 1e6:.0f}" for key in ("process", "tensors", "computed"))
        ratios = " | ".join(f"{each['computed'] / each[key]:.3f}" for key in ("process", "tensors"))
        lines.append(f"| {name} | {figures} | {ratios} | {each['held'] / 1e6:.0f} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/memory.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        be_case(args.case, args.out)
        return 0
    results = measure()
    text = page(results)
    print(text)
    args.out.write_text(text)
    return int(any(abs(each["computed"] / each["process"] - 1) > MOST_OFF for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
