"""Write one HTML page on a run, or on a sweep and export its best run.

cascade-train report runs/x
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from cascade_train.commands import export
from cascade_train.commands.parts.command_line import Command, listed
from cascade_train.config.saved import CONFIG_NAME, recipe_of
from cascade_train.config.sweeps.runs import LOSS, Result, ended_runs, key_of, metric_of, ranked
from cascade_train.engine.run import report as pages
from cascade_train.engine.run.report import is_number, newest_grid, read_metrics
from cascade_train.errors import ConfigError, RunError, unwritten
from cascade_train.files.output import check_output
from cascade_train.files.run_folder import run_named
from cascade_train.files.untrusted import read_mapping

MOST_SHOWN = 24
"""Runs of a sweep whose curves and samples are shown, the best of them."""
SHOWN = (LOSS, "validate/", "validate_ema/")
"""Prefixes of the curves that a sweep's page shows."""
LEVEL = "_logsnr_"
"""In the names of losses at one noise level, of which a sweep has too many."""


@dataclass(kw_only=True)
class ReportArgs:
    """Write one HTML page, which needs no other file, on a run or on a sweep, whose best run it can export."""

    source: str
    """A run, or the folder of a sweep."""
    against: Any = None
    """Other runs, one or a list: their curves are drawn too, and their settings compared."""
    out: str | None = None
    """Page to write; null = report.html in the folder of the run or sweep."""
    overwrite: bool = False
    """Replace a file at out= that is no such page."""
    promote: str | None = None
    """Of a sweep: folder that the best run is exported to, as `cascade-train export from=<best run> out=…` does."""
    allow_any_target: bool = False
    """For promote: build whatever classes the run's configuration names; trust it first."""


def report(args: ReportArgs) -> int:
    """Write the page, export what is promoted, print where both are, and return 0."""
    folder = Path(args.source)
    results = [] if (folder / CONFIG_NAME).is_file() else sweep_results(folder)
    if results and args.against is not None:
        raise ConfigError(f"against={args.against}: is for the page of a run. That of a sweep has all its runs.")
    best = None if args.promote is None else best_run(args, results)
    path = folder / pages.PAGE_NAME if args.out is None else Path(args.out).expanduser()
    check_output(path, "report", overwrite=args.overwrite)
    against = [run_named("against", each) for each in listed(args.against)]
    if results:
        data = sweep_data(folder, results)
    else:
        bases = recipe_of(overrides_of(folder), pages.read_config(folder))
        data = pages.run_data(folder, bases=bases, against=against)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pages.write_page(path, data)
    except OSError as error:
        raise RunError(f"{unwritten(path, error)}. Choose another out.") from error
    sys.stdout.write(f"{path} shows {folder}\n")
    if best is not None:
        export.export(export.ExportArgs(source=str(best), out=args.promote, allow_any_target=args.allow_any_target))
    return 0


def overrides_of(run: Path) -> list[str]:
    """Overrides that a run was started with."""
    return [str(word) for word in read_mapping(run / "start.json", overrides=list).get("overrides", [])]


def sweep_results(folder: Path) -> list[Result]:
    """Results of a sweep's ended runs, the best first; a ConfigError where there are none.

    A run is looked for in the sweep's folder, which may have been moved, then where it was when it ended.
    """
    results = ended_runs(folder)
    if not results:
        reason = f"neither {CONFIG_NAME} nor results.jsonl with a result in it"
        reason = reason if folder.is_dir() else "no such folder"
        raise ConfigError(f"from={folder}: {reason}. Name the folder of a run, or of a sweep a run of which has ended.")
    for result in results:
        here = folder / Path(result["run_dir"]).name
        result["values"] = {name: value for name, value in result["values"].items() if is_number(value)}
        result["run_dir"] = str(here if here.is_dir() or not Path(result["run_dir"]).is_dir() else result["run_dir"])
    return ranked(results)


def best_run(args: ReportArgs, results: Sequence[Result]) -> Path:
    """Directory of the best of the ranked results; a ConfigError where there is none."""
    if not results:
        raise ConfigError(
            f"promote={args.promote}: is for a sweep, and {args.source} is a run. Export that with cascade-train "
            f"export from={args.source} out={args.promote}."
        )
    name, _ = metric_of(results)
    if results[0]["exit_code"] or results[0]["values"].get(name) is None:
        raise ConfigError(
            f"promote={args.promote}: no run of {args.source} ended well with a value of {name}, so that none is the "
            "best. Start the sweep again to finish its runs."
        )
    return Path(results[0]["run_dir"])


def sweep_data(folder: Path, results: Sequence[Result]) -> pages.Data:
    """Data of a sweep's page from its ranked results, as JSON values with secrets hidden."""
    name, mode = metric_of(results)
    runs = {Path(result["run_dir"]).name: Path(result["run_dir"]) for result in results[:MOST_SHOWN]}
    grids = {run: grid for run, path in runs.items() if (grid := newest_grid(path)) is not None}
    failed = sum(bool(result["exit_code"]) for result in results)
    best = "smallest" if mode == "min" else "largest"
    text = {
        "title": f"Sweep {folder.resolve().name}",
        "state": {"kind": "stopped" if failed else "finished", "text": f"{len(results)} runs, {failed} failed."},
        "facts": {"best run": results[0]["run_dir"], "ranked by": f"{name}, the {best} first"},
        "sweep": {"metric": name, "mode": mode, **sweep_table(results, name)},
        "config": pages.read_config(Path(results[0]["run_dir"])),
    }
    curves = []
    for run, path in runs.items():
        metrics = read_metrics(path, pages.MOST_POINTS_OF_ANOTHER)
        shown = {name: curve for name, curve in metrics.items() if name.startswith(SHOWN) and LEVEL not in name}
        curves.append({"name": run, "series": pages.series(shown)})
    return {**pages.hide_secrets(text), "runs": curves, "samples": pages.samples(grids)}


def sweep_table(results: Sequence[Result], metric: str) -> pages.Data:
    """The `keys` in whose values the runs differ, and a row for each run."""
    settings = [dict(setting(str(override)) for override in result["overrides"]) for result in results]
    every = dict.fromkeys(key for own in settings for key in own)
    keys = [key for key in every if len({str(own.get(key)) for own in settings}) > 1]
    rows = [
        {
            "run": Path(result["run_dir"]).name,
            "values": [own.get(key) for key in keys],
            "metric": result["values"].get(metric),
            "step": result["metrics"].get("step"),
            "note": str(result.get("state") or (f"exit code {result['exit_code']}" if result["exit_code"] else "")),
        }
        for result, own in zip(results, settings, strict=True)
    ]
    return {"keys": keys, "rows": rows}


def setting(override: str) -> tuple[str, float | str]:
    """Key of an override and its value, as a number where it is one."""
    value = override.partition("=")[2]
    try:
        number = int(value) if value.isdecimal() else float(value)
    except ValueError:
        return key_of(override), value
    return key_of(override), number if isfinite(number) else value


COMMAND = Command(arguments=ReportArgs, run=report, usage="RUN key=value …", words=("from",))
