"""Runs on several ranks that pay for importing torch once: each rank of each run is a fork of one process.

usage: forked.py FILE, a JSON list of runs [{"ranks": 2, "argv": [...], "hook": null, "out": "folder"}, ...]

Every rank writes what it said to `<out>/said_<rank>`; a hook, of this file or `<file beside it>.<name>`, changes what a
rank does, or notes what it sees; where argv is null it is all that the rank does. Several have a space between them.
Split weights are gathered unit by unit, as those of large networks are, unless `gather_at_once` is a hook; runs leave
no page and no model card. Prints the exit codes, per run and rank, as JSON.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cascade_train.__main__ import launch
from cascade_train.assembly import model
from cascade_train.assembly import run as build
from cascade_train.distributed import sharded
from cascade_train.distributed.parallelize import local
from cascade_train.distributed.sharded import Gather, Scatter
from cascade_train.engine.loop import Trainer
from cascade_train.engine.phase import averaged
from cascade_train.models.cascade.convolutional import ConvolutionalCompressor
from cascade_train.models.formats.weights import StoredTensors
from cascade_train.tasks.text_to_image import TextToImage

GATHERED_AT_ONCE_BYTES = sharded.GATHERED_AT_ONCE_BYTES


def poison_last_rank(out: Path) -> None:
    """Make the loss of one sample of the last rank not finite, in the third step."""
    loss, steps = TextToImage.loss, Counter()

    def poisoned(self: TextToImage, prepared: Any) -> Any:
        output = loss(self, prepared)
        steps["seen"] += 1
        if dist.get_rank() == dist.get_world_size() - 1 and steps["seen"] == 3:
            output.loss_B.data[0] = float("nan")
        return output

    TextToImage.loss = poisoned


def count_exchanges(out: Path) -> None:
    """Write how often weights were gathered and gradients reduced in the last step to `<out>/exchanges_<rank>`."""
    counted: Counter[str] = Counter()
    for where, name, title in (
        (Gather, "__call__", "gathered"),
        (Scatter, "__call__", "scattered"),
        (dist, "all_reduce", "all_reduce"),
    ):
        original = getattr(where, name)

        def counting(*args: Any, _original: Any = original, _title: str = title, **kwargs: Any) -> Any:
            counted[_title] += 1
            return _original(*args, **kwargs)

        setattr(where, name, counting)
    train_step = Trainer.train_step

    def step(self: Trainer, micro_batches: Any) -> Any:
        counted.clear()
        values = train_step(self, micro_batches)
        (out / f"exchanges_{dist.get_rank()}").write_text(json.dumps(counted))
        return values

    Trainer.train_step = step


def count_calls(out: Path) -> None:
    """Write how many images each call of the semantic compressor had to `<out>/calls_<rank>`, after each."""
    encode, calls = ConvolutionalCompressor.encode, list[int]()

    def counting(self: ConvolutionalCompressor, image_BCHW: torch.Tensor) -> torch.Tensor:
        calls.append(len(image_BCHW))
        (out / f"calls_{dist.get_rank()}").write_text(json.dumps(calls))
        return encode(self, image_BCHW)

    ConvolutionalCompressor.encode = counting


def look_at_averages(out: Path) -> None:
    """After the run, write predictions with the weights, with the average, and with the weights again."""
    run = Trainer.run

    def then_look(self: Trainer) -> None:
        run(self)
        prepared = self.task.prepare_batch(next(iter(self.feed))[0])
        seen = []
        for _ in range(2):
            seen.append(self.task.evaluate(prepared, 0.0).tolist())
            with averaged(self.phases):
                seen.append(self.task.evaluate(prepared, 0.0).tolist())
        dtypes = sorted({str(p.dtype) for p in self.phases[0].parameters.values()})
        (out / f"averages_{dist.get_rank()}").write_text(json.dumps({"seen": seen, "dtypes": dtypes}))

    Trainer.run = then_look


def look_at_dtypes(out: Path) -> None:
    """Write the dtypes of weights, gradients, optimizer state and average before each update."""
    train_step = Trainer.train_step

    def step(self: Trainer, micro_batches: Any) -> Any:
        phase = self.phases[0]
        seen: dict[str, list[str]] = {}
        clip = phase.clip

        def looking(*at: int) -> Any:
            norm = clip(*at)
            network = self.task.stage.network
            seen["trained"] = sorted({str(p.dtype) for p in phase.parameters.values()})
            seen["gradients"] = sorted({str(p.grad.dtype) for p in phase.parameters.values()})
            frozen = [p for p in network.parameters() if not p.requires_grad]
            seen["frozen"] = sorted({str(p.dtype) for p in frozen})
            seen["frozen_with_gradients"] = [str(p.dtype) for p in frozen if p.grad is not None]
            return norm

        phase.clip = looking
        values = train_step(self, micro_batches)
        state = [v for s in phase.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        seen["state"] = sorted({str(v.dtype) for v in state})
        (out / f"dtypes_{dist.get_rank()}").write_text(json.dumps(seen))
        return values

    Trainer.train_step = step


def compile_eagerly(out: Path) -> None:
    """Trace and differentiate compiled units as torch.compile does, but run their graphs without making kernels."""
    nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")


def only_trace(out: Path) -> None:
    """Trace compiled units as torch.compile does, and run what was traced as it is."""
    nn.Module.compile = partialmethod(nn.Module.compile, backend="eager")


def count_loading(out: Path) -> None:
    """Write the bytes of the network before and after it got memory, and of each read of its weights."""
    seen: dict[str, Any] = {"reads": []}
    materialise, read_rows = model.materialise, StoredTensors.read_rows

    def write() -> None:
        (out / f"loading_{dist.get_rank()}").write_text(json.dumps(seen))

    def looking(root: nn.Module, device: torch.device) -> Any:
        open_ones = [p for p in root.parameters() if p.is_meta]
        seen["whole"], seen["largest"] = (how(p.nbytes for p in open_ones) for how in (sum, max))
        seen["one_row_each"] = sum(p.nbytes // len(p) for p in open_ones)
        seen["before"] = sum(local(p).nbytes for p in root.parameters() if not p.is_meta)
        shares = materialise(root, device)
        seen["after"] = sum(rows.nbytes for rows, _ in shares.values())
        write()
        return shares

    def reading(self: StoredTensors, *arguments: Any) -> torch.Tensor:
        rows = read_rows(self, *arguments)
        if rows.nbytes:  # none of it: its dtype was looked at
            seen["reads"].append(rows.nbytes)
            write()
        return rows

    model.materialise, StoredTensors.read_rows = looking, reading


def die_before_exports(out: Path) -> None:
    """End the process between the last checkpoint and the exports."""
    build.write_exports = lambda *_: os._exit(9)


def gather_at_once(out: Path) -> None:
    """Gather the split weights of a small network at once, as runs do that are not forked here."""
    sharded.GATHERED_AT_ONCE_BYTES = GATHERED_AT_ONCE_BYTES


HOOKS = {
    hook.__name__: hook
    for hook in (
        poison_last_rank,
        count_calls,
        count_exchanges,
        look_at_averages,
        look_at_dtypes,
        compile_eagerly,
        only_trace,
        count_loading,
        die_before_exports,
        gather_at_once,
    )
}


def find_hook(name: str) -> Callable[[Path], None]:
    """Return a hook by its name."""
    file, _, hook = name.rpartition(".")
    return getattr(importlib.import_module(file), hook) if file else HOOKS[name]


IMPORTED_FIRST = (
    *("torch._dynamo", "torch.distributed.checkpoint.state_dict", "cascade_train.data.shapes"),
    *("cascade_train.models.cascade.stage_c", "cascade_train.models.text_encoder"),
    "cascade_train.models.cascade.convolutional",
    *("cascade_train.tasks.finetune", "cascade_train.models.formats.export"),
    "cascade_train.models.cascade.networks.response_norm",
)
"""What the first run would import in each of its ranks, and then once more here."""


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def be_rank(rank: int, port: int, run: dict[str, Any]) -> int:
    """Do one rank's part of a run; return its exit code."""
    out = Path(run["out"])
    with (out / f"said_{rank}").open("a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    if run["ranks"] > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run["ranks"], "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    try:
        sharded.GATHERED_AT_ONCE_BYTES = 0
        build.write_report = build.write_card = lambda *_, **__: None  # they are for people
        for hook in (run["hook"] or "").split():
            find_hook(hook)(out)
        return 0 if run["argv"] is None else launch(run["argv"])
    except BaseException:
        traceback.print_exc()
        return 99
    finally:
        (out / "said_modules").write_text("\n".join(sys.modules))


def import_what_ranks_imported(file: Path) -> None:
    """Import here, once, what ranks have imported as they went, so that later ones find it."""
    for name in file.read_text().splitlines() if file.exists() else ():
        if name not in sys.modules:
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)


def main() -> None:
    """Fork the ranks of each run, one run after the other."""
    sys.path.insert(0, str(Path(__file__).parents[2]))  # hooks name other tests by their full path
    codes = []
    for name in IMPORTED_FIRST:
        importlib.import_module(name)
    for run in json.loads(Path(sys.argv[1]).read_text()):
        port, children = free_port(), []
        Path(run["out"]).mkdir(parents=True, exist_ok=True)
        gc.freeze()  # what is here now is not looked at in ranks, so that they share its memory
        for rank in range(run["ranks"]):
            child = os.fork()
            if child == 0:
                code = be_rank(rank, port, run)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            children.append(child)
        codes.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
        import_what_ranks_imported(Path(run["out"]) / "said_modules")
    sys.stdout.write(json.dumps(codes) + "\n")


if __name__ == "__main__":
    main()
