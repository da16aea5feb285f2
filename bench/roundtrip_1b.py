"""A full-size single-file checkpoint goes in, trains a step, comes out in both layouts, equal but for the step.

    python bench/roundtrip_1b.py               # 1B parameters: about 20 GB of memory and 12 GB of disk, on a CPU
    python bench/roundtrip_1b.py --model c_tiny

Writes random bf16 values under the original's names, trains one step of plain gradient descent on it, exports, and
prints the largest differences. Exits with 1 where one is larger than the step can be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.utils import instantiate
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cascade_train.__main__ import launch
from cascade_train.commands.export import ExportArgs, export
from cascade_train.config.groups import option_files
from cascade_train.models.cascade.family import original_state

LR = 1e-3
SMALL_RUN = (
    "data=shapes",
    "optimizer=torch",
    "optimizer.algorithm._target_=torch.optim.SGD",
    f"optimizer.lr={LR}",
    "optimizer.weight_decay=0",
    "train.max_steps=1",
    "train.global_batch_size=1",
    "train.precision=fp32",
    "sample.every_steps=null",
    "checkpoint.every_steps=1",
    "model.image_size=64",
    "model.image_encoder=null",
    "model.text_encoder.num_hidden_layers=1",
    "debug=random_weights",
)
"""One step on one small picture; the towers keep their widths and lose their depth."""


@dataclass(frozen=True, kw_only=True)
class Roundtrip:
    """What came out.

    Attributes:
        tensors: number of tensors of the file.
        moved: length of the difference between what went in and what came out, over all weights.
        between_layouts: largest difference between the two layouts.
    """

    tensors: int
    moved: float
    between_layouts: float

    @property
    def passed(self) -> bool:
        """Return whether the weights moved, by no more than a step with a gradient of length 1, and equally."""
        return 0.0 < self.moved <= LR * 1.001 and self.between_layouts == 0.0


def write_original(path: Path, model: str) -> None:
    """Write random bf16 values under the original's names and shapes for a size."""
    config = instantiate(option_files("model")[model]["network"], _convert_="all")
    generator = torch.Generator().manual_seed(0)
    shapes = {name: value.shape for name, value in config.build().state_dict().items()}
    values = {name: (0.02 * torch.randn(shape, generator=generator)).bfloat16() for name, shape in shapes.items()}
    save_file(original_state(values), path)


def roundtrip(model: str, folder: Path) -> Roundtrip:
    """Run the way in, a step, and the way out.

    Raises:
        RuntimeError: a command that failed.
    """
    stored, run = folder / f"{model}.safetensors", folder / "run"
    write_original(stored, model)
    code = launch([*SMALL_RUN, f"model={model}", "task=finetune", f"model.weights={stored}", f"run.dir={run}"])
    if code:
        raise RuntimeError(f"training ended with exit code {code}")
    export(ExportArgs(source=str(run), format="original"))
    before, after = (_read(path) for path in (stored, run / "export" / "prior.original.safetensors"))
    if {n: t.shape for n, t in before.items()} != {n: t.shape for n, t in after.items()}:
        raise RuntimeError("other names or shapes came out than went in")
    moved = sum(
        float((after[name] - value.float()).square().sum(dtype=torch.float64)) for name, value in before.items()
    )
    diffusers: dict[str, Tensor] = {}
    for path in sorted((run / "export" / "prior" / "prior").glob("*.safetensors")):
        diffusers |= _read(path)
    found = original_state(diffusers)
    between = max(float((found[name] - value).abs().max()) for name, value in after.items())
    return Roundtrip(tensors=len(after), moved=moved**0.5, between_layouts=between)


def _read(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def main() -> int:
    """Run and print; return 0 where all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="c_1b")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = roundtrip(arguments.model, Path(folder))
    verdict = "passed" if found.passed else "FAILED"
    sys.stdout.write(
        f"{verdict}: {found.tensors} tensors; all weights moved by {found.moved:.3g} (a step of at most {LR:g}); "
        f"the layouts differ by {found.between_layouts:g}\n"
    )
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
