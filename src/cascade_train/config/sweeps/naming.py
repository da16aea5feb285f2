"""Where the runs of a sweep lie: `multirun/<name>/<what was swept>`, such as `multirun/lora-c_1b/lr=0.0001,rank=4`.

The folder's name does not depend on what stays the same, so that a second call with more steps continues the runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from hydra.conf import HydraConf
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from cascade_train.config.overrides import parses
from cascade_train.redaction import redact, redact_argument

SWEEP_DIR, RUN_DIR = "multirun", "runs/${run.name}"
"""`hydra.sweep.dir` and `run.dir` where nobody has set them, as in conf/config.yaml."""

DELETED = "~"
"""How an override begins that takes a key away; Hydra gives `~key` to a sweep's runs as `~key=null`."""

LONGEST_NAME = 120
"""Characters of a run's name before it is cut and hashed; folder names end at 255 bytes."""

NAMED_ANYWAY = {"model", "task", "run.name"}
"""Keys that stand in the name of the sweep already, where nothing is swept."""


def place_sweep(cfg: DictConfig) -> Path:
    """Give a sweep, and its jobs, a folder named by `run.name`, unless `hydra.sweep.dir` is set, and return it."""
    if cfg.hydra.sweep.dir == SWEEP_DIR:
        with read_write(cfg.hydra):  # Hydra 1.4 has closed it by now
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
    fixed = {key_of(each) for each in argv if ("=" in each or each.startswith(DELETED)) and parses(each)}
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
    """Return `text`, or what is shown of it, with only characters that are safe in a folder's name, cut to its length.

    What is not shown counts by a hash.
    """
    safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text if shown is None else shown)
    if safe == text and len(text) <= LONGEST_NAME:
        return text
    return f"{safe[:LONGEST_NAME]}-{blake2b(text.encode(), digest_size=4).hexdigest()}"
