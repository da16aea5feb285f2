"""What runs do beside their steps, and the commands that read them, on the pretended device: what is noted in each.

usage: python -m tests.pretended.works FOLDER, in which is works.json: by name, {"run": overrides, "verbs": by name,
arguments of a command; {run} and {out} in them are folders, "planted": whether mistakes are made, from then on}

Each runs on the host first. Writes noted.json: by name, {"works": by work (validate, sample and save, each the last of
a run; export, which ends it; each verb), a list of [kind, operation, where, how often], "unequal": files that differ
from those of the host, "compared": how many do not}.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cascade_train.__main__ import launch
from cascade_train.assembly import cache_making
from cascade_train.diffusion.sampler import ImageNoise
from cascade_train.distributed import parallelize, process_group
from cascade_train.engine import validation
from cascade_train.engine.loop import Trainer
from cascade_train.results.evaluation.measures import Pictures
from tests.pretended.runs import join_on_the_device, move

NOTED: dict[str, list[list[Any]]] = {}


@contextmanager
def noting(name: str) -> Iterator[None]:
    """Keep what is noted within, in place of what was noted under this name before."""
    from tests.pretended.device import SEEN

    SEEN.clear()
    yield
    NOTED[name] = [[*each, count] for each, count in SEEN.items()]
    SEEN.clear()


def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Trainer, *args: Any) -> Any:
        with noting(name):
            out = method(self, *args)
            self.store.wait()
        return out

    return run


def planted(made: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def mistaken(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = made(*args, **kwargs)
        out.sum().item()
        return out

    return mistaken


def plant() -> None:
    """Wait once for each batch that is measured, each noise of a picture, each batch of features, each kept tensor."""
    validation.counted_samples = planted(validation.counted_samples)  # type: ignore[assignment]
    ImageNoise.__call__ = planted(ImageNoise.__call__)  # type: ignore[method-assign]
    Pictures._stacked = planted(Pictures._stacked)  # type: ignore[method-assign]
    to_host = cache_making.Encoder._kept

    def kept(self: cache_making.Encoder, tensor: torch.Tensor) -> torch.Tensor:
        tensor.sum().item()
        return to_host(self, tensor)

    cache_making.Encoder._kept = kept  # type: ignore[method-assign]


def train(work: dict[str, Any], out: Path) -> None:
    assert launch([*work["run"], f"run.dir={out}"]) == 0, work["run"]


def results(run: Path) -> dict[str, Any]:
    """Return what a run measured, without times, and the bytes of its pictures and weights, by file."""
    files = [*run.glob("samples/**/*.png"), *run.glob("export/**/*.safetensors")]
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in row.items() if k not in ("images_per_second", "data_wait_share")} for row in rows]
    return {"metrics.jsonl": metrics, **{str(each.relative_to(run)): each.read_bytes() for each in files}}


def do(work: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train, then run the commands; return what was noted in each."""
    if work["planted"]:
        plant()
    NOTED.clear()
    with noting("export"):
        train(work, folder / "run")
    for name, arguments in work["verbs"].items():
        with noting(name):
            assert launch([each.format(run=folder / "run", out=folder / name) for each in arguments]) == 0, name
    host, device = results(folder / "host"), results(folder / "run")
    unequal = [name for name in host.keys() | device.keys() if host.get(name) != device.get(name)]
    return {"works": dict(NOTED), "unequal": sorted(unequal), "compared": len(host)}


def main() -> None:
    """Do all works, one after another."""
    importlib.import_module("tests.pretended.device")
    importlib.import_module("tests.warm.quick").compose_quickly()
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(False)  # of attention on the host: it sums otherwise
    works = json.loads((folder / "works.json").read_text())
    for name, work in works.items():
        train(work, folder / name / "host")
    from tests.pretended.device import DEVICE

    process_group._join, parallelize.move = join_on_the_device, move
    cache_making.first_device = lambda: DEVICE  # type: ignore[assignment]
    for name, method in {"validate": "measure", "sample": "show", "save": "save"}.items():
        setattr(Trainer, method, noted(name, getattr(Trainer, method)))
    (folder / "noted.json").write_text(json.dumps({name: do(work, folder / name) for name, work in works.items()}))


if __name__ == "__main__":
    main()
