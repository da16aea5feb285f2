"""The runs of a sweep: their names and folders, and their results, ranked and shown as a table.

A run lies in `multirun/<name>/<what was swept>`, such as `multirun/lora-c_1b/lr=0.0001,rank=4`. The folder does not
depend on what stays the same, so that a second call with more steps continues the runs.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from cascade_train.config.overrides import parses
from cascade_train.files.untrusted import read_mapping, read_rows
from cascade_train.redaction import redact, redact_argument

SWEEP_DIR, RUN_DIR = "multirun", "runs/${run.name}"
"""Defaults of `hydra.sweep.dir` and `run.dir`, as in conf/config.yaml."""
DELETED = "~"
"""Prefix of an override that deletes a key; Hydra gives `~key` to a sweep's runs as `~key=null`."""
LONGEST_NAME = 120
"""Characters of a run's name before it is cut and hashed; folder names end at 255 bytes."""
NAMED_ANYWAY = {"model", "task", "run.name"}
"""Keys in the name of the sweep, where nothing is swept."""
RESULTS = "results.jsonl"
"""The ranked results, in the folder of a sweep; `.results/` has a file of each run."""
VALIDATION, LOSS = "validate/loss", "loss"
LOSS_STEPS = 100
"""Steps at the end of a run whose mean loss ranks it; that of one step is noise."""
Result = dict[str, Any]
"""Of a run: its overrides, directory, exit code, metrics of the last step, and values that may rank it."""
KINDS = {
    "run_dir": str,
    "exit_code": int,
    "values": dict,
    "metrics": dict,
    "overrides": list,
    "best_metric": list | None,
}
"""The types of a result's values."""


def place_sweep(cfg: DictConfig) -> Path:
    """Give a sweep, and its jobs, a folder named by `run.name`, unless `hydra.sweep.dir` is set, and return it."""
    if cfg.hydra.sweep.dir == SWEEP_DIR:
        with read_write(cfg.hydra):
            cfg.hydra.sweep.dir = f"{SWEEP_DIR}/{folder_name(sweep_name(cfg))}"
            cfg.hydra.overrides.hydra.append(f'hydra.sweep.dir="{cfg.hydra.sweep.dir}"')
    return Path(cfg.hydra.sweep.dir)


def sweep_name(cfg: DictConfig) -> str:
    """Return `run.name`; of a group that is swept, the group."""
    choices = cfg.hydra.runtime.choices
    name = str(OmegaConf.to_container(cfg.run, resolve=False)["name"])  # type: ignore[index, call-overload]
    return re.sub(r"\${hydra:runtime\.choices\.(\w+)}", lambda group: choices.get(group[1]) or group[1], name)


def place_run(cfg: DictConfig, hydra_cfg: HydraConf, argv: Sequence[str]) -> None:
    """Give a run of a sweep its name and its directory, by what was swept, in place; other runs keep theirs."""
    if hydra_cfg.mode != RunMode.MULTIRUN:
        return
    part = swept_part(hydra_cfg.overrides.task, argv)
    folder = folder_of_runs(cfg, hydra_cfg.sweep.dir)
    if part:
        cfg.run.name = folder_name(redact_argument(f"{cfg.run.name}-{part}"))
    if folder is not None:
        cfg.run.dir = str(folder / (part or cfg.run.name))


def folder_of_runs(cfg: DictConfig, sweep_dir: str) -> Path | None:
    """Return the folder in which each run has one of its own; None where `run.dir` follows from the run's name."""
    written = str(OmegaConf.to_container(cfg.run, resolve=False)["dir"])  # type: ignore[index, call-overload]
    if written == RUN_DIR:
        return Path(sweep_dir)
    return None if "${run.name}" in written else Path(cfg.run.dir)


def swept_part(overrides: Sequence[str], argv: Sequence[str]) -> str:
    """Return a folder's name by those overrides of a run that the command line gives several values."""
    last = {key_of(each): each for each in argv if "=" in each or each.startswith(DELETED)}
    fixed = {key for key, each in last.items() if parses(each)}
    deleted = {key_of(override) for override in overrides if override.startswith(DELETED)}
    values = {key_of(override): override.partition("=")[2].strip("'\"") for override in overrides}
    swept = {key: value for key, value in values.items() if key not in fixed}
    kept = swept or {key: value for key, value in values.items() if key not in NAMED_ANYWAY}
    kept.pop("run.dir", None)
    short = {key: re.split(r"[./@]", key)[-1] for key in kept}
    times = Counter(short.values())
    names = {key: name if times[name] == 1 else key for key, name in short.items()}
    each = [f"no-{names[key]}" if key in deleted else f"{names[key]}={kept[key]}" for key in sorted(kept)]
    return folder_name(redact(",".join(each)), shown=",".join(map(redact_argument, each)))


def key_of(override: str) -> str:
    """Return what an override sets or deletes."""
    return override.partition("=")[0].lstrip(f"+{DELETED}")


def folder_name(text: str, *, shown: str | None = None) -> str:
    """Return `text`, or the `shown` form, safe and short for a folder; where that differs, with a hash of `text`."""
    safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text if shown is None else shown)
    if safe == text and len(text) <= LONGEST_NAME:
        return text
    return f"{safe[:LONGEST_NAME]}-{blake2b(text.encode(), digest_size=4).hexdigest()}"


def ended_runs(folder: Path, **more: Any) -> list[Result]:
    """Return the results of a sweep's runs; with `more` values, those of each run's file."""
    kinds = KINDS | more
    found = [] if more else list(read_rows(folder / RESULTS, **kinds))
    found = found or [read_mapping(path, **kinds) for path in sorted((folder / ".results").glob("[!.]*.json"))]
    whole = [each for each in found if kinds.keys() - {"best_metric"} <= each.keys()]
    return [each for each in whole if (each.get("best_metric") or ["", "min"])[1:] in (["min"], ["max"])]


def measured(path: Path, best_metric: str | None) -> Result:
    """Return `metrics`, the last line of a run's `metrics.jsonl` that can be read, and `values` that may rank it."""
    names = {VALIDATION, best_metric or VALIDATION} - {LOSS}
    newest, known = deque[Result](maxlen=LOSS_STEPS), dict[str, Any]()
    for row in read_rows(path):
        newest.append(row)
        known |= {name: row[name] for name in sorted(names) if row.get(name) is not None}
    losses = [row[LOSS] for row in newest if row.get(LOSS) is not None]
    mean = {LOSS: sum(losses) / len(losses)} if losses else {}
    return {"metrics": newest[-1] if newest else {}, "values": mean | known}


def metric_of(results: Sequence[Result]) -> tuple[str, str]:
    """Return the metric that ranks the runs, and whether `min` or `max` is good."""
    default = VALIDATION if any(VALIDATION in result["values"] for result in results) else LOSS
    name, mode = next((each["best_metric"] for each in results if each.get("best_metric")), (default, "min"))
    return str(name), str(mode)


def ranked(results: Sequence[Result]) -> list[Result]:
    """Return the results, the best first; those that failed, or have no value, last."""
    name, mode = metric_of(results)
    sign = 1 if mode == "min" else -1

    def place(result: Result) -> tuple[bool, bool, float]:
        value = result["values"].get(name)
        return bool(result["exit_code"]), value is None, sign * (value or 0.0)

    return sorted(results, key=place)


def table(results: Sequence[Result]) -> str:
    """Return one line per run with its value, its step and how it ended, below a line that names the metric."""
    name, mode = metric_of(results)
    how = f"the mean of its last {LOSS_STEPS} steps" if name == LOSS else "as last measured"
    lines = [f"Runs by {name}, {how}; the {'smallest' if mode == 'min' else 'largest'} is the best:"]
    lines.append(f"{name:>14} {'step':>8}  run")
    for result in ranked(results):
        value, step = result["values"].get(name), result["metrics"].get("step", "-")
        shown = "-" if value is None else f"{value:.6g}"
        notes = [f"exit code {result['exit_code']}"] if result["exit_code"] else []
        notes += [result["state"]] if result.get("state") else []
        notes += [f"log {result['log']}"] if result.get("log") else []
        notes += ["from an earlier call"] if result["earlier"] else []
        note = f"  ({', '.join(notes)})" if notes else ""
        lines.append(f"{shown:>14} {step:>8}  {result['run_dir']}{note}")
    return "".join(f"{line}\n" for line in lines)
