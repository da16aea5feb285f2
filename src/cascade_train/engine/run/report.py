"""The page of a run: the contents of its folder in one HTML file; what is missing or damaged is left out.

report.html draws the charts from the page's own JSON. Metrics are read once, line by line, in bounded memory.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import jinja2

from cascade_train.engine.checkpoint.folder import EVALUATIONS, CheckpointFolder, evaluations, whole_manifest
from cascade_train.engine.run.config_difference import find_differences
from cascade_train.errors import ConfigError
from cascade_train.files.durable import remove_abandoned, replacing, to_yaml
from cascade_train.files.run_folder import exported_step
from cascade_train.files.untrusted import PICTURE_BYTES, open_regular, read_json, read_lines, read_mapping, read_rows
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
SHOWN_LAST = ("step", "samples_seen", "loss", "validate/loss", "validate_ema/loss", "lr", "images_per_second")
"""Metrics whose last value is among the facts."""

Data = dict[str, Any]
Configs = Mapping[str, Mapping[str, Any]]

_PICTURE = re.compile(r"(\d+)_(\w+)\.png")


class Curve:
    """Values of a metric at its steps, thinned as they come to points of `width` successive ones, about `most`.

    Attributes:
        step, value: the last ones.
        lowest: the lowest value and its step.
    """

    def __init__(self, most: int) -> None:
        self.width, self.step, self.value, self.lowest = 1, 0, math.nan, (math.inf, 0)
        self._most = most
        self._points: list[tuple[int, float, float, float]] = []
        self._steps: list[int] = []
        self._values: list[float] = []

    def extend(self, steps: Sequence[int], values: Sequence[Any]) -> None:
        """Append values of JSON; what is no finite number is left out."""
        if set(map(type, values)) != {float} or not math.isfinite(sum(values)):
            numbers = [(step, value) for step, value in zip(steps, values, strict=True) if is_number(value)]
            if not numbers:
                return
            steps, values = zip(*numbers, strict=True)
        low = min(values)
        if low < self.lowest[0]:
            self.lowest = low, steps[values.index(low)]
        self.step, self.value = steps[-1], values[-1]
        self._steps.extend(steps)
        self._values.extend(values)
        begin = 0
        while begin + self.width <= len(self._values):
            self._points.append(self._point(begin, begin + self.width))
            begin += self.width
            if len(self._points) == 2 * (self._most // 2 + 1):
                pairs = zip(self._points[::2], self._points[1::2], strict=True)
                self._points = [(b[0], a[1] / 2 + b[1] / 2, min(a[2], b[2]), max(a[3], b[3])) for a, b in pairs]
                self.width *= 2
        del self._steps[:begin], self._values[:begin]

    def _point(self, begin: int, end: int | None = None) -> tuple[int, float, float, float]:
        values = self._values[begin:end]
        mean = sum(values) / len(values)
        if math.isinf(mean):
            mean = math.fsum(value / len(values) for value in values)
        return self._steps[begin:end][-1], mean, min(values), max(values)

    def points(self) -> dict[str, list[float]]:
        """Last step `x` and mean `y` of each point; of points of several values also their `low` and `high`."""
        points = [*self._points, self._point(0)] if self._values else self._points
        columns = dict(zip(("x", "y", "low", "high"), map(list, zip(*points, strict=True)), strict=True))
        return columns if self.width > 1 else {"x": columns["x"], "y": columns["y"]}


Metrics = dict[str, Curve]


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
    """HTML page of `run_data`, or of a sweep's data."""
    return _template().render(data=data, config=to_yaml(data["config"], allow_unicode=True))


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True)
    environment.policies["json.dumps_kwargs"] = {}  # in the order of the data
    environment.filters["shown"] = lambda value: value if isinstance(value, str) else json.dumps(value)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def hide_secrets(text: Data) -> Data:
    """Values of files as JSON has them, their secrets hidden."""
    plain: Data = json.loads(json.dumps(redacted(text), default=str), parse_constant=str)
    return plain


def run_data(folder: Path, *, bases: Configs, against: Sequence[Path] = ()) -> Data:
    """What the page of a run shows, as JSON values with secrets hidden.

    `bases` are the configurations that the run's is compared with, by name; the runs `against` are compared too, and
    their curves are drawn beside.
    """
    metrics, config = {**read_metrics(folder), **read_evaluations(folder)}, read_config(folder)
    start = read_mapping(folder / "start.json", facts=dict, data=list, overrides=list)
    name = str(config.get("run", {}).get("name", folder.resolve().name))
    steps = {f"step {step}": path for step, path in step_folders(folder / "samples").items()}
    others = {str(other): read_config(other) for other in against}
    curves = {str(other): series(read_metrics(other, MOST_POINTS_OF_ANOTHER)) for other in against}
    overrides = [str(override) for override in start.get("overrides", [])]
    last = {key: float(metrics[key].value) for key in SHOWN_LAST if key in metrics}
    text = {
        "title": f"Run {name}",
        "state": state(folder, metrics),
        "facts": {
            **start.get("facts", {}),
            **{key: f"{value:,.0f}" if value.is_integer() else f"{value:.6g}" for key, value in last.items()},
        },
        "data": start.get("data", []),
        "notes": list(notes(folder, metrics)),
        "overrides": overrides,
        "differences": [_difference(base, old, config, overrides) for base, old in {**bases, **others}.items()],
        "config": config,
        "environment": read_mapping(folder / "environment.json"),
    }
    runs = {name: series(metrics), **curves}
    return {
        **hide_secrets(text),
        "runs": [{"name": run, "series": shown} for run, shown in runs.items()],
        "noise_levels": noise_levels(steps),
        "samples": samples(steps),
    }


def read_config(folder: Path) -> Data:
    """Configuration of a run; empty where it cannot be read."""
    return read_mapping(folder / "config.yaml", run=dict)


def read_metrics(folder: Path, most: int = MOST_POINTS, *, until: float = math.inf) -> Metrics:
    """Curves of a run's metrics up to a step, by name."""
    curves: Metrics = {}
    with suppress(ConfigError):
        lines = read_lines(folder / "metrics.jsonl")
        while part := list(islice(lines, 1000)):
            rows = (row for row in _parsed(part) if isinstance(row, dict) and _is_step(row.get("step"), until))
            for names, alike in groupby(rows, key=tuple):
                columns = dict(zip(names, zip(*(row.values() for row in alike), strict=True), strict=True))
                for name, values in columns.items():
                    curve = curves.get(name) or curves.setdefault(name, Curve(most))
                    curve.extend(columns["step"], values)
    return {name: curve for name, curve in curves.items() if not math.isnan(curve.value)}


def _parsed(lines: Sequence[bytes]) -> list[Any]:
    """Values of lines of JSON, all at once, which is fast; one by one where one is damaged."""
    try:
        return list(read_json(b"[" + b",".join(lines) + b"]"))
    except ValueError:
        if len(lines) == 1:
            return []
        middle = len(lines) // 2
        return _parsed(lines[:middle]) + _parsed(lines[middle:])


def _is_step(value: Any, until: float) -> bool:
    return type(value) is int and is_number(value) and value <= until


def read_evaluations(folder: Path) -> Metrics:
    """Curves of a run's latest evaluations, without those of weights that it has replaced."""
    manifests = [whole_manifest(path) for path in CheckpointFolder(folder / "checkpoints").visible().values()]
    stamps = {manifest.step: manifest.stamp for manifest in manifests if manifest is not None}
    curves: Metrics = {}
    for step, numbers in sorted(evaluations(folder / EVALUATIONS, stamps).items()):
        for name, value in numbers.items():
            if is_number(step) and is_number(value):
                curves.setdefault(name, Curve(MOST_POINTS)).extend([step], [value])
    return curves


def series(metrics: Metrics) -> dict[str, dict[str, list[float]]]:
    """Points of each metric by name, see `Curve.points`."""
    return {name: curve.points() for name, curve in metrics.items() if name not in ("step", "samples_seen")}


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number, and no integer of more than 64 bits."""
    if type(value) is float:
        return -math.inf < value < math.inf
    return type(value) is int and -(2**63) < value < 2**63


def state(folder: Path, metrics: Metrics) -> Data:
    """How far a run is: `kind` finished, stopped or unfinished, and a sentence."""
    stop, step = read_mapping(folder / "stopped.json"), metrics["step"].step if "step" in metrics else 0
    if stop:
        return {"kind": "stopped", "text": str(stop.get("reason", "Stopped."))}
    if exported_step(folder) == step:
        return {"kind": "finished", "text": f"Finished at step {step}."}
    return {"kind": "unfinished", "text": f"At step {step}: it trains, or ended without a record of its own."}


def notes(folder: Path, metrics: Metrics) -> Iterator[Data]:
    """Yield what happened to a run and what is worth a look, the `warning`s marked, with the names of samples."""

    def warning(text: str, names: Sequence[str] = ()) -> Data:
        return {"text": text, "warning": True, "names": names}

    for line in read_rows(folder / "config_history.jsonl", changes=dict):
        pairs = [(key, pair) for key, pair in line.get("changes", {}).items() if isinstance(pair, list)]
        changes = "; ".join(f"{key}: {' → '.join(map(str, pair))}" for key, pair in pairs)
        text = f"Continued at step {line.get('step')}, {line.get('time')}{f', with {changes}' if changes else ''}."
        yield {"text": text, "warning": False, "names": []}
    unreadable = [line for path in sorted((folder / "quarantine").glob("*.jsonl")) for line in read_rows(path)]
    if unreadable:
        named = [f"{line.get('sample')}: {line.get('reason')}" for line in unreadable[:MOST_NAMES]]
        yield warning(f"{len(unreadable)} samples could not be read.", named)
    for line in list(read_rows(folder / EVALUATIONS, caution=str))[-1:]:
        if "caution" in line:
            yield warning(f"Evaluation of step {line.get('step')}: {line['caution']}")
    if "data_wait_share" in metrics:
        share = statistics.fmean(metrics["data_wait_share"].points()["y"])
        if share > SLOW_DATA:
            yield warning(f"The loop waited for data in {share:.0%} of its time. Raise data.num_workers.")
    if (losses := metrics.get("validate/loss")) is not None and losses.lowest[0] < losses.value:
        lowest, step = losses.lowest
        yield warning(f"validate/loss was lowest at step {step}, {lowest:.6g}; it is {losses.value:.6g} now.")


def noise_levels(folders: Mapping[str, Path]) -> list[Data]:
    """Unweighted loss over logSNR that the newest grids have a chart of, by label."""
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
    """Pictures in folders of grids: `labels`, and by prompt `caption` and a `pictures` list of each kind.

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
    """Pictures of a grid by the number of their prompt and their kind."""
    names = [(match, path) for path in sorted(folder.glob("*.png")) if (match := _PICTURE.fullmatch(path.name))]
    found = {(int(match[1]), match[2]): path for match, path in names}
    return {key: path for key, path in found.items() if key[0] < MOST_ROWS}


def _embed_picture(path: Path) -> tuple[str | None, str]:
    """A picture as a data url and its caption; None and nothing where it is damaged."""
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
    """A picture of Pillow, None where it is damaged."""
    from PIL import Image  # the list of commands needs none of it

    try:
        with open_regular(path, limit=PICTURE_BYTES) as file, Image.open(file) as picture:
            picture.load()
            return picture
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # Pillow raises all of them for damage
        return None


def _pick_evenly(folders: Mapping[str, Path], most: int) -> list[tuple[str, Path]]:
    """At most this many folders, evenly spaced, the first and the last included."""
    every = list(folders.items())
    count = min(most, len(every))
    return [every[round(place * (len(every) - 1) / max(count - 1, 1))] for place in range(count)]


def _difference(base: str, old: Mapping[str, Any], new: Mapping[str, Any], overrides: Sequence[str]) -> Data:
    """Keys whose values differ, as key, other value, own value and whether the command line sets it."""
    keys = {override.partition("=")[0].lstrip("+~") for override in overrides}
    rows = [
        [
            difference.key,
            difference.old,
            difference.new,
            any(f"{difference.key}.".startswith(f"{key}.") for key in keys),
        ]
        for difference in find_differences(redacted(old), redacted(new))
    ]
    return {"base": base, "rows": sorted(rows, key=lambda row: not row[3])}


def step_folders(folder: Path) -> dict[int, Path]:
    """Folders `step_<n>` in a folder, in the order of their steps."""
    found = {path: path.name.removeprefix("step_") for path in folder.glob("step_*")}
    return dict(sorted((int(step), path) for path, step in found.items() if step.isdecimal()))


def newest_grid(folder: Path, step: int | None = None, name: str = "") -> Path | None:
    """Folder of a run's newest grid of samples, up to a step and with a file of a name where these count."""
    found = reversed(step_folders(folder / "samples").items())
    return next((path for at, path in found if (step is None or at <= step) and (path / name).exists()), None)
