"""The page of a run: the contents of its folder in one HTML file.

Leaves out what is missing or damaged. report.html draws the charts from the page's own JSON.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import logging
import math
import re
import statistics
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2

from cascade_train.engine.checkpoint.folder import EVALUATIONS, CheckpointFolder, evaluations, whole_manifest
from cascade_train.engine.run.config_difference import find_differences
from cascade_train.files.durable import remove_abandoned, replacing, to_yaml
from cascade_train.files.run_folder import exported_step
from cascade_train.files.untrusted import PICTURE_BYTES, open_regular, read_json, read_mapping, read_rows
from cascade_train.redaction import redact, redacted

log = logging.getLogger(__name__)

PAGE_NAME = "report.html"
TEMPLATE = Path(__file__).with_name("report.html")
MOST_POINTS, MOST_POINTS_OF_ANOTHER = 1500, 400
"""Points of a curve; with more values each point is the mean of as many successive ones."""
MOST_ROWS, MOST_PICTURES, PICTURE_PX, QUALITY = 8, 120, 320, 84
"""Prompts shown, pictures in all, their longer side in pixels and their quality as JPEG."""
MOST_LEVELS = 8
"""Charts of the loss by noise level."""
MOST_NAMES = 50
SLOW_DATA = 0.2
"""Share of the time spent waiting for data that is worth a warning."""

Data = dict[str, Any]
Configs = Mapping[str, Mapping[str, Any]]
Metrics = Mapping[str, tuple[Sequence[int], Sequence[float]]]
"""By name, the steps at which a metric was finite, and its values."""

_PICTURE = re.compile(r"(\d+)_(\w+)\.png")


def write_report(folder: Path, bases: Callable[[], Configs]) -> None:
    """Write the page of a run that has taken a step into its folder; a failure is only logged."""
    if not (folder / "metrics.jsonl").is_file():
        return
    try:
        write_page(folder / PAGE_NAME, run_data(folder, bases=bases()))
    except Exception as error:  # whatever it is, the run itself is done
        reason = redact(f"{type(error).__name__}: {error}")
        log.warning("%s could not be written (%s). Only the page is missing.", folder / PAGE_NAME, reason)


def write_page(path: Path, data: Data) -> None:
    """Write the page of a run or a sweep; raise OSError where it cannot be written."""
    remove_abandoned(path.parent)
    with replacing(path, racing=True, durable=False) as beside:
        beside.write_text(page(data), encoding="utf-8", errors="replace")


def page(data: Data) -> str:
    """Return the HTML page of `run_data`, or of a sweep's data."""
    return _template().render(data=data, config=to_yaml(data["config"], allow_unicode=True))


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True)
    environment.policies["json.dumps_kwargs"] = {}  # in the order of the data
    environment.filters["shown"] = lambda value: value if isinstance(value, str) else json.dumps(value)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def hide_secrets(text: Data) -> Data:
    """Return values of files as JSON has them, their secrets hidden."""
    plain: Data = json.loads(json.dumps(redacted(text), default=str), parse_constant=str)
    return plain


def run_data(folder: Path, *, bases: Configs, against: Sequence[Path] = ()) -> Data:
    """Return what the page of a run shows, as JSON values with secrets hidden.

    `bases` are the configurations that the run's is compared with, by name; the runs `against` are compared too, and
    their curves are drawn beside.
    """
    metrics, config = {**read_metrics(folder), **read_evaluations(folder)}, read_config(folder)
    start = read_mapping(folder / "start.json", facts=dict, data=list, overrides=list)
    environment = read_mapping(folder / "environment.json")
    name = str(config.get("run", {}).get("name", folder.resolve().name))
    steps = {f"step {step}": path for step, path in step_folders(folder / "samples").items()}
    others = {str(other): read_config(other) for other in against}
    curves = {str(other): series(read_metrics(other), MOST_POINTS_OF_ANOTHER) for other in against}
    overrides = [str(each) for each in start.get("overrides", [])]
    text = {
        "title": f"Run {name}",
        "state": state(folder, metrics),
        "facts": {**start.get("facts", {}), **_last_values(metrics)},
        "data": start.get("data", []),
        "notes": list(notes(folder, metrics)),
        "overrides": overrides,
        "differences": [_difference(base, each, config, overrides) for base, each in {**bases, **others}.items()],
        "config": config,
        "environment": environment,
    }
    return {
        **hide_secrets(text),
        "runs": [{"name": name, "series": series(metrics)}, *({"name": n, "series": c} for n, c in curves.items())],
        "noise_levels": noise_levels(steps),
        "samples": samples(steps),
    }


def read_config(folder: Path) -> Data:
    """Return the configuration of a run; empty where it cannot be read."""
    return read_mapping(folder / "config.yaml", run=dict)


def series(metrics: Metrics, most: int = MOST_POINTS) -> dict[str, dict[str, list[float]]]:
    """Return each metric's values `y` at the steps `x`.

    Of more than `most` values, `y` are means of as many successive ones each, `x` the last step of each, and `low` and
    `high` the extremes.
    """
    shown = {name: each for name, each in metrics.items() if name not in ("step", "samples_seen")}
    return {name: _curve(steps, values, -(-len(steps) // most)) for name, (steps, values) in shown.items()}


def _curve(steps: Sequence[int], values: Sequence[float], width: int) -> dict[str, list[float]]:
    if width == 1:
        return {"x": list(steps), "y": list(values)}
    parts = [values[first : first + width] for first in range(0, len(values), width)]
    ends = [steps[min(first + width, len(steps)) - 1] for first in range(0, len(steps), width)]
    extremes = {"low": [min(each) for each in parts], "high": [max(each) for each in parts]}
    return {"x": [*ends], "y": [math.fsum(value / len(each) for value in each) for each in parts], **extremes}


def state(folder: Path, metrics: Metrics) -> Data:
    """Return how far a run is: `kind` finished, stopped or unfinished, and a sentence."""
    exported, stop = exported_step(folder), read_mapping(folder / "stopped.json")
    step = metrics["step"][0][-1] if "step" in metrics else 0
    if stop:
        return {"kind": "stopped", "text": str(stop.get("reason", "Stopped."))}
    if exported == step:
        return {"kind": "finished", "text": f"Finished at step {step}."}
    return {"kind": "unfinished", "text": f"At step {step}: it trains, or ended without a record of its own."}


def notes(folder: Path, metrics: Metrics) -> Iterator[Data]:
    """Yield what happened to a run and what is worth a look, the `warning`s marked, with the names of samples."""
    for line in read_rows(folder / "config_history.jsonl", changes=dict):
        pairs = [(key, pair) for key, pair in line.get("changes", {}).items() if isinstance(pair, list)]
        changes = "; ".join(f"{key}: {' → '.join(map(str, pair))}" for key, pair in pairs)
        text = f"Continued at step {line.get('step')}, {line.get('time')}{f', with {changes}' if changes else ''}."
        yield {"text": text, "warning": False, "names": []}
    unreadable = [line for path in sorted((folder / "quarantine").glob("*.jsonl")) for line in read_rows(path)]
    if unreadable:
        named = [f"{line.get('sample')}: {line.get('reason')}" for line in unreadable[:MOST_NAMES]]
        yield {"text": f"{len(unreadable)} samples could not be read.", "warning": True, "names": named}
    for line in list(read_rows(folder / EVALUATIONS, caution=str))[-1:]:
        if "caution" in line:
            yield {"text": f"Evaluation of step {line.get('step')}: {line['caution']}", "warning": True, "names": []}
    _, waits = metrics.get("data_wait_share", ((), ()))
    if waits and statistics.fmean(waits) > SLOW_DATA:
        text = f"The loop waited for data in {statistics.fmean(waits):.0%} of its time. Raise data.num_workers."
        yield {"text": text, "warning": True, "names": []}
    steps, losses = metrics.get("validate/loss", ((), ()))
    if losses and min(losses) < losses[-1]:
        at = steps[losses.index(min(losses))]
        text = f"validate/loss was lowest at step {at}, {min(losses):.6g}; it is {losses[-1]:.6g} now."
        yield {"text": text, "warning": True, "names": []}


def noise_levels(folders: Mapping[str, Path]) -> list[Data]:
    """Return the unweighted loss over logSNR that the newest grids have a chart of, by label."""
    found = []
    for label, folder in _pick_evenly(folders, MOST_LEVELS):
        picture = _open_picture(folder / "loss_by_logsnr.png")
        with suppress(AttributeError, ValueError, LookupError, TypeError):  # damaged, or none of ours
            points = read_json(picture.info["points"])
            x, y = points["x"], points["y"]
            if x and len(x) == len(y) and all(map(is_number, [*x, *y])):
                found.append({"label": label, "x": x, "y": y})
    return found


def samples(folders: Mapping[str, Path]) -> Data:
    """Return the pictures in folders of grids: `labels`, and by prompt `caption` and a `pictures` list of each kind.

    Pictures are small JPEGs as data urls, None where a folder lacks one.
    """
    count = max((len(_pictures(folder)) for folder in folders.values()), default=0)
    chosen = _pick_evenly(folders, max(2, MOST_PICTURES // max(count, 1)))
    rows: dict[int, Data] = {}
    for place, (_, folder) in enumerate(chosen):
        for (number, kind), path in _pictures(folder).items():
            row = rows.setdefault(number, {"caption": "", "pictures": {}})
            url, caption = _embed_picture(path)
            row["pictures"].setdefault(kind, [None] * len(chosen))[place] = url
            row["caption"] = caption or row["caption"]
    return {"labels": [label for label, _ in chosen], "rows": [rows[number] for number in sorted(rows)]}


def _pictures(folder: Path) -> dict[tuple[int, str], Path]:
    """Return the pictures of a grid by the number of their prompt and their kind."""
    names = [(match, path) for path in sorted(folder.glob("*.png")) if (match := _PICTURE.fullmatch(path.name))]
    found = {(int(match[1]), match[2]): path for match, path in names}
    return {key: path for key, path in found.items() if key[0] < MOST_ROWS}


def _embed_picture(path: Path) -> tuple[str | None, str]:
    """Return a picture as a data url and its caption; None and nothing where it is damaged."""
    picture = _open_picture(path)
    if picture is None:
        return None, ""
    small = picture.convert("RGB")
    small.thumbnail((PICTURE_PX, PICTURE_PX))
    file = io.BytesIO()
    small.save(file, format="jpeg", quality=QUALITY)
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    return url, redact(str(picture.info.get("caption", "")))


def _open_picture(path: Path) -> Any:
    """Return a picture of Pillow, None where it is damaged."""
    from PIL import Image  # the list of commands needs none of it

    try:
        with open_regular(path, limit=PICTURE_BYTES) as file, Image.open(file) as picture:
            picture.load()
            return picture
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # Pillow raises all of them for damage
        return None


def _pick_evenly(folders: Mapping[str, Path], most: int) -> list[tuple[str, Path]]:
    """Return at most this many folders, evenly spaced, the first and the last included."""
    every = list(folders.items())
    count = min(most, len(every))
    return [every[round(place * (len(every) - 1) / max(count - 1, 1))] for place in range(count)]


def _difference(base: str, old: Mapping[str, Any], new: Mapping[str, Any], overrides: Sequence[str]) -> Data:
    """Return the keys whose values differ, as key, other value, own value and whether the command line sets it."""
    keys = {override.partition("=")[0].lstrip("+~") for override in overrides}
    rows = [
        [each.key, each.old, each.new, any(f"{each.key}.".startswith(f"{key}.") for key in keys)]
        for each in find_differences(redacted(old), redacted(new))
    ]
    return {"base": base, "rows": sorted(rows, key=lambda row: not row[3])}


def _last_values(metrics: Metrics) -> dict[str, str]:
    """Return the newest value of what a reader asks first."""
    names = ("step", "samples_seen", "loss", "validate/loss", "validate_ema/loss", "lr", "images_per_second")
    last = {name: float(metrics[name][1][-1]) for name in names if name in metrics}
    return {name: f"{value:,.0f}" if value.is_integer() else f"{value:.6g}" for name, value in last.items()}


def read_metrics(folder: Path) -> Metrics:
    """Return the numbers of a run, line by line: a file of a million steps is larger than what is kept of it."""
    found: dict[str, tuple[array[int], array[float]]] = defaultdict(lambda: (array("q"), array("d")))
    for row in read_rows(folder / "metrics.jsonl"):
        step: Any = row.get("step")
        for name, value in row.items() if isinstance(step, int) and is_number(step) else ():
            if is_number(value):
                steps, values = found[name]
                steps.append(step)
                values.append(value)
    return dict(found)


def read_evaluations(folder: Path) -> Metrics:
    """Return the latest numbers of a run's evaluations, without those of weights that it has replaced."""
    manifests = [whole_manifest(path) for path in CheckpointFolder(folder / "checkpoints").visible().values()]
    stamps = {manifest.step: manifest.stamp for manifest in manifests if manifest is not None}
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for step, numbers in evaluations(folder / EVALUATIONS, stamps).items():
        for name, value in numbers.items():
            if is_number(step) and is_number(value):
                found[name][step] = value
    return {name: (steps := sorted(values), [values[step] for step in steps]) for name, values in found.items()}


def step_folders(folder: Path) -> dict[int, Path]:
    """Return the folders `step_<n>` in a folder, in the order of their steps."""
    found = {path: path.name.removeprefix("step_") for path in folder.glob("step_*")}
    return dict(sorted((int(step), path) for path, step in found.items() if step.isdecimal()))


def newest_grid(folder: Path, step: int | None = None, name: str = "") -> Path | None:
    """Return the folder of a run's newest grid of samples, up to a step and with a file of a name where these count."""
    found = reversed(step_folders(folder / "samples").items())
    return next((path for at, path in found if (step is None or at <= step) and (path / name).exists()), None)


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a finite number, and no integer of more than 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < (2**63 if isinstance(value, int) else math.inf)
