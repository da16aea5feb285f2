"""What a start costs: CPU seconds, user and system, of processes that take turns, as JSON and a page.

python bench/start.py --rounds 5 --out bench/results/start.md
python bench/start.py --rounds 5 --tasks lora --before ../other/src

`hydra` composes the same configuration in a bare Hydra application. `imports` of a training are those of a process
that imports the modules which a training of one step had imported when it ended, each without what its package would
import beside it where the training did without that; `first step` is a training that ends when it has taken one, before
it saves, exports, draws and reports; `needs` imports only the libraries that the training cannot do
without: the class of its network, its text tower, an optimizer that steps, checkpoints. `four libraries` imports
torch, transformers, torchvision and accelerate. With `--before` trainings of another checkout take turns with these.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` is a package of this checkout

from bench.soak import commit

ROOT = Path(__file__).resolve().parents[1]
CHOICE = ("task=finetune", "model=c_tiny")
TASKS = ("finetune", "lora", "controlnet")

HYDRA = f"""
import hydra
from hydra.core.config_store import ConfigStore
from cascade_train.config.schema import Root

ConfigStore.instance().store(name="schema", node=Root)
hydra.main(version_base="1.3", config_path={str(ROOT / "conf")!r}, config_name="config")(lambda cfg: None)()
"""
NEEDS = """
import torch
import torch.distributed.checkpoint
from diffusers.models.unets.unet_stable_cascade import StableCascadeUNet
from transformers import CLIPTextModelWithProjection

weight = torch.nn.Parameter(torch.ones(1))
weight.sum().backward()
torch.optim.AdamW([weight]).step()
"""
TRAIN = """
import atexit, sys
from pathlib import Path
from cascade_train.__main__ import main

modules = Path(sys.argv.pop(1))
atexit.register(lambda: modules.write_text("\\n".join(sys.modules)))
main()
"""
FIRST_STEP = """
import os, sys
from cascade_train.__main__ import main
from cascade_train.engine.loop import Trainer

step = Trainer.train_step

def train_step(*args):
    step(*args)
    sys.stderr.flush()
    os._exit(0)

Trainer.train_step = train_step
main()
"""
IMPORT = """
import contextlib, sys, warnings
from pathlib import Path
from cascade_train.files.package import without_siblings

warnings.simplefilter("ignore")
names = Path(sys.argv[1]).read_text().split()
imported = set(names)
for name in names:
    package = name.rpartition(".")[0]
    alone = without_siblings(package) if package and package not in imported else contextlib.nullcontext()
    with contextlib.suppress(Exception), alone:
        exec(f"import {name}")
"""


def used() -> float:
    """Return the CPU time, user and system, of all children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def cpu_seconds(arguments: Sequence[str], folder: Path, source: Path | None) -> float:
    """Return the CPU time of one Python process and its children, with the package of another `source` if given."""
    before = used()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {} if source is None else {"PYTHONPATH": str(source.resolve())}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments[-4:])} ended with {done.returncode}: {done.stderr}")
    return used() - before


def measure(rounds: int, folder: Path, tasks: Sequence[str], before: Path | None) -> dict[str, list[float]]:
    """Return the seconds of every kind of start, one value a round, after a round that only fills caches."""
    train = "-m", "cascade_train"
    starts = {
        "hydra": ("-c", HYDRA, *CHOICE, "--cfg", "job"),
        "--cfg job": (*train, *CHOICE, "--cfg", "job"),
        "--help": (*train, "--help"),
        "torch": ("-c", "import torch"),
        "four libraries": ("-c", "import torch, transformers, torchvision, accelerate"),
        "needs": ("-c", NEEDS),
    }
    for task in tasks:
        run = f"task={task}", "model=c_tiny", "train.max_steps=1", "sample.every_steps=null", "run.resume=never"
        starts[f"{task}, one step"] = "-c", TRAIN, f"{task}.modules", *run
        if before is not None:
            starts[f"{task}, before, one step"] = "-c", TRAIN, f"{task}-before.modules", *run
        starts[f"{task}, first step"] = "-c", FIRST_STEP, *run
        starts[f"{task}, imports"] = "-c", IMPORT, f"{task}.modules"
    taken: dict[str, list[float]] = {name: [] for name in starts}
    for turn in range(rounds + 1):
        for name, arguments in starts.items():
            own = (f"run.dir={folder}/{turn}-{name.replace(', ', '-')}",) if name.endswith("step") else ()
            source = before if ", before" in name else None
            taken[name].append(cpu_seconds((*arguments, *own), folder, source))
    return {name: values[1:] for name, values in taken.items()}


def ratios(median: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Return the claims, each with its limit."""
    beyond = median["needs"] - median["torch"]
    return {
        "`--cfg job` / Hydra on the same files": (median["--cfg job"] / median["hydra"], 1.3),
        **{
            f"(imports of {task} - what it needs beside torch) / torch": (
                (median[f"{task}, imports"] - beyond) / median["torch"],
                1.5,
            )
            for task in TASKS
            if f"{task}, imports" in median
        },
    }


def page(result: dict[str, object], taken: dict[str, list[float]], claims: dict[str, tuple[float, float]]) -> str:
    """Return the page."""
    rows = [f"| {name} | {statistics.median(v):.2f} | {min(v):.2f} | {max(v):.2f} |" for name, v in taken.items()]
    shown = [f"| {name} | {value:.2f} | {limit} |" for name, (value, limit) in claims.items()]
    head = f"Commit {result['commit']}, {result['date']}. {result['machine']}."
    return "\n".join(
        [
            "# What a start costs",
            "",
            f"    {result['command']}",
            "",
            head,
            "",
            "CPU seconds, user and system, medians of processes that take turns; `bench/start.py` says what each does.",
            "",
            "| start | median | least | most |",
            "|---|---|---|---|",
            *rows,
            "",
            "| ratio | measured | at most |",
            "|---|---|---|",
            *shown,
            "",
            NOTE,
        ]
    )


NOTE = """What is left lies in libraries that cannot be asked for less: `transformers` lists all its models, imports its
generation (and with it `torch._dynamo`, which `torch.optim` would import at its first step anyway), `accelerate`, and
`torchvision` and `boto3` where they are installed. `diffusers.models.unets` would import all its networks and `peft`;
one module of it is imported without the others (`src/cascade_train/files/package.py`), which "needs" does not do.
"""


def main() -> int:
    """Measure, print JSON, write the page; 1 = a ratio is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--before", type=Path, help="src of another checkout, whose trainings are measured too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        taken = measure(arguments.rounds, Path(folder), arguments.tasks, arguments.before)
    claims = ratios({name: statistics.median(values) for name, values in taken.items()})
    result: dict[str, object] = {
        "command": " ".join(["python", "bench/start.py", *sys.argv[1:]]),
        "commit": commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "seconds": taken,
        "ratios": {name: value for name, (value, _) in claims.items()},
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(page(result, taken, claims), encoding="utf-8")
    return int(any(value > limit for value, limit in claims.values()))


if __name__ == "__main__":
    sys.exit(main())
