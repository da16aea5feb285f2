"""Show where two runs differ, from their settings to their tensors.

cascade-train compare runs/x runs/y
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import merge
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from cascade_train.commands.parts.command_line import Command
from cascade_train.config.saved import CONFIG_NAME
from cascade_train.engine.checkpoint.folder import CheckpointFolder, Manifest, read_manifest
from cascade_train.engine.run.config_difference import describe, find_differences, flatten
from cascade_train.errors import ConfigError
from cascade_train.files.run_folder import run_named
from cascade_train.files.untrusted import load_mapping, read_json, read_lines, read_mapping

OWN = ("run.name", "run.dir")
"""Settings in which any two runs differ."""
PASSING = ("time", "command_line")
"""Facts of a start in which any two differ."""
_STEP = re.compile(rb'\{"step": (\d{1,18})\b')
_CLOCKED = re.compile(rb', "(?:images_per_second|data_wait_share)": [^,}]*')
"""Metrics that are read off a clock."""
MOST_SHOWN = 10
"""Differing tensors that are listed."""


@dataclass(kw_only=True)
class CompareArgs:
    """Show where two runs differ, from their settings to their tensors.

    Ends with 1 where their numbers, data or checkpoints differ, else with 0. Numbers are compared at the steps that
    both have, tensors in the first checkpoint of both from the first differing step on, else in their newest.
    """

    source: str
    """The first run."""
    other: str
    """The second run."""


def compare(args: CompareArgs) -> int:
    """Print each part; return 1 where numbers, data or checkpoints differ, else 0."""
    one, other = (run_named(key, name) for key, name in (("from", args.source), ("other", args.other)))
    configs = [load_mapping(folder / CONFIG_NAME) for folder in (one, other)]
    back = {each.key for each in find_differences(*reversed(configs))}  # keys that are newer than one are no difference
    settings = [each for each in find_differences(*configs) if each.key in back and each.key not in OWN]
    _show("Settings", describe(settings))
    starts = (flatten(read_mapping(folder / "environment.json")) for folder in (one, other))
    _show("Versions and devices", describe([each for each in find_differences(*starts) if each.key not in PASSING]))
    step, numbers = differing_step(one, other)
    _show("Numbers", *numbers)
    for path in (path for folder in (one, other) for path in damaged_checkpoints(folder)):
        sys.stdout.write(f"{path} is damaged, and not compared\n")
    checkpoints = common_checkpoint(one, other, step)
    if checkpoints is None:
        _show("Checkpoints", "  no step has one in both", differing="not compared")
        return int(step is not None)
    manifests = read_manifest(checkpoints[0]), read_manifest(checkpoints[1])
    where = f"at step {manifests[0].step}"
    data = "\n".join(f"  {line}" for line in data_differences(*manifests))
    _show("Data", data, f"equal {where}", f"differ {where}")
    tensors = _differing_tensors(checkpoints, manifests)
    more = "\n  …" * (len(tensors) > MOST_SHOWN)
    shown = "\n".join(f"  {line}" for line in tensors[:MOST_SHOWN]) + more
    _show("Checkpoints", shown, f"equal {where}", f"differ {where}")
    return int(step is not None or bool(data) or bool(tensors))


def differing_step(one: Path, other: Path) -> tuple[int | None, tuple[str, str]]:
    """First step of both whose metrics differ, None where there is none; and what is shown of it.

    Both files are read once, side by side, and no further than that step.
    """
    common, last = 0, [0, 0]
    for step, group in groupby(merge(_metrics(0, one), _metrics(1, other), key=itemgetter(0)), itemgetter(0)):
        rows = {side: row for _, side, row in group}
        for side in rows:
            last[side] = step
        common += len(rows) == 2
        if len(rows) == 2 and rows[0] != rows[1]:
            found = find_differences(read_json(rows[0]), read_json(rows[1]))
            lines = [f"  {each.key}: {each.old} and {each.new}{_relative(each.old, each.new)}" for each in found]
            return step, ("\n".join([f"  first at step {step}", *lines]), "")
    length = ", ".join(f"{step} of {folder}" for step, folder in zip(last, (one, other), strict=True))
    equal = f"equal in the {common} steps that both have" if common else "not compared, no step is in both"
    return None, ("", f"{equal} (the last is {length})")


def _metrics(side: int, folder: Path) -> Iterator[tuple[int, int, bytes]]:
    """Step, side and text of each whole row in the order of steps, without what is read off a clock."""
    before = -1
    with suppress(ConfigError):
        for line in read_lines(folder / "metrics.jsonl"):
            begin = _STEP.match(line)
            if begin and line.endswith(b"}\n") and (step := int(begin[1])) > before:
                before = step
                yield step, side, _CLOCKED.sub(b"", line)


def damaged_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints that are not complete."""
    folder = CheckpointFolder(run / "checkpoints")
    whole = folder.complete()
    return [path for step, path in folder.visible().items() if step not in whole]


def common_checkpoint(one: Path, other: Path, step: int | None) -> tuple[Path, Path] | None:
    """Return the two checkpoints to compare; None where no step has a complete one in both."""
    folders = [CheckpointFolder(each / "checkpoints") for each in (one, other)]
    both = sorted(folders[0].complete().keys() & folders[1].complete().keys())
    if not both:
        return None
    chosen = next((each for each in both if step is not None and each >= step), both[-1])
    return folders[0].path(chosen), folders[1].path(chosen)


def data_differences(one: Manifest, other: Manifest) -> Iterator[str]:
    """Yield in what the position in the data, or the data, differs."""
    first, second = (flatten(each.facts.get("data", {})) for each in (one, other))
    for each in find_differences(_split(first), _split(second)):
        what = "other samples or captions" if each.key == "content" else f"{each.old} and {each.new}"
        yield f"{each.key}: {what}"


def _differing_tensors(paths: tuple[Path, Path], manifests: tuple[Manifest, Manifest]) -> list[str]:
    """Return the first lines on entries that differ; equal files are not read."""
    if manifests[0].files == manifests[1].files:
        return []
    from cascade_train.engine.checkpoint.loading import tensor_differences  # heavy: torch

    return list(islice(tensor_differences(paths, manifests), MOST_SHOWN + 1))


def _split(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts of the data, those of its identity one by one."""
    identity = dict(word.partition("=")[::2] for word in str(data.get("identity", "")).split())
    return {key: value for key, value in data.items() if key != "identity"} | identity


def _relative(one: Any, other: Any) -> str:
    numbers = isinstance(one, int | float) and isinstance(other, int | float) and one
    return f" ({abs(other / one - 1):.1e} of it)" if numbers else ""


def _show(part: str, differences: str, equal: str = "equal", differing: str = "differ") -> None:
    sys.stdout.write(f"{part}: {differing}\n{differences}\n" if differences else f"{part}: {equal}\n")


COMMAND = Command(arguments=CompareArgs, run=compare, usage="RUN OTHER", words=("from", "other"))
