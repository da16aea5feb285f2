"""The text of `--help`: the commands, what is set first, the groups with their options, and every key."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import cascade_train
from cascade_train.config.arguments import HYDRA_KEYS
from cascade_train.config.groups import group_options, groups
from cascade_train.config.meanings import meaning_of

WIDTH, INDENT = 120, 42

FIRST = {
    "task=lora": "what trains; or a recipe with all its settings: experiment=finetune_c_3b_lora",
    "model=c_3b": "which stage, and how large; names ending in _tiny train on a laptop",
    "data.path=pictures": "a folder of pictures with captions beside them (.txt), a .csv or a .parquet; "
    "for tar files in the webdataset layout: data.urls='\"a-{00..05}.tar\"'",
    "run.name=mine": "the run is written to runs/mine; the same command continues it",
    "train.max_steps=2000": "optimizer steps",
    "train.global_batch_size=16": "samples of a step, over all ranks",
    "train.micro_batch_size=1": "samples that one rank holds at once: lower it when memory runs out",
    "optimizer.lr=1e-4": "learning rate",
}
"""What a first run sets, as typed -> meaning."""

HEAD = (
    "Train any part of Stable Cascade: cascade-train group=option ... key=value ... (or torchrun -m cascade_train ...)"
)
FOOT = """Quote values with braces, spaces or symbols: 'data.urls="a-{000..005}.tar"'.
--cfg job prints the composed configuration, --info defaults shows where it comes from, --multirun a=1,2 sweeps.
"""


@functools.cache
def commands() -> dict[str, str]:
    """Return the commands by name, each with the first line of its file."""
    files = sorted((Path(cascade_train.__file__).parent / "commands").glob("[!_]*.py"))
    docs = {file.stem: ast.get_docstring(ast.parse(file.read_bytes())) or "" for file in files}
    return {name: doc.partition("\n")[0] for name, doc in docs.items()}


def help_text(cfg: DictConfig) -> str:
    """Return the help for a composed configuration, whose components show the keys of the options chosen."""
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=False)  # type: ignore[assignment]
    options = {f"{group}=": ", ".join(group_options(group)) for group in groups()}
    keys = {f"{key}={_shown(value)}": meaning_of(key, plain) for key, value in _leaves(plain)}
    parts = {
        "Set first": FIRST,
        "Commands (cascade-train <command> key=value ...; <command> --help lists its keys)": commands(),
        "Groups (group=option)": options,
        "Keys (key=value) of the options chosen": keys,
    }
    return "\n\n".join([HEAD, *(f"== {title} ==\n{table(rows)}" for title, rows in parts.items()), FOOT])


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys that may be set, typed nodes before components, as the root lists them."""
    for key, value in sorted(node.items(), key=lambda pair: "_target_" in pair[1] if isinstance(pair[1], dict) else 0):
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif key not in HYDRA_KEYS:
            yield f"{prefix}{key}", value


def table(rows: Mapping[str, str]) -> str:
    """Return names and their meanings in two columns."""
    return "\n".join(_row(name, meaning) for name, meaning in rows.items())


def _row(name: str, meaning: str) -> str:
    name = f"  {name}"
    gap = "" if len(name) < INDENT - 1 else f"\n{' ' * INDENT}"
    text = textwrap.fill(meaning, WIDTH, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT).lstrip()
    return f"{name:<{INDENT}}{gap}{text}".rstrip()


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_shown, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return "{}" if value == {} else str(value)
