"""Import another trainer's configuration as an experiment.

    cascade-train recipe import official.yaml out=conf-dir/experiment/name.yaml

Reads a training file of the original trainer, or of open-diffusion. What a key means lives in config/recipes/.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from cascade_train.commands.parts.command_line import Command
from cascade_train.config.recipes.official import BEHAVIOURS, from_official, is_official
from cascade_train.config.recipes.open_diffusion import from_open_diffusion, is_open_diffusion
from cascade_train.config.recipes.recipe import Recipe
from cascade_train.config.saved import load_yaml
from cascade_train.errors import ConfigError
from cascade_train.options import check_least
from cascade_train.redaction import printable

MAX_BYTES = 1_000_000
REFERENCE = re.compile(r"\$\{([\w.-]+)\}")
MAX_REFERENCES, LONGEST = 20, 10_000
"""How many interpolations are followed, one behind the other or within one text, and how long what they make may be."""


@dataclass(kw_only=True)
class ImportArgs:
    """Import a training file of Stable Cascade's trainer, or of open-diffusion, as an experiment."""

    source: str
    """The file: a training configuration of Stable Cascade's own trainer, or of open-diffusion."""
    out: str
    """What to write: experiment/<name>.yaml in a folder of yours, which --config-dir names."""
    ranks: int = 1
    """Processes that it will run on, where the file counts per process."""
    behaviour: str | None = None
    """What applies where a file of Stable Cascade is silent: original, what its trainer does (null too); or ours."""
    model: str = "c_3b"
    """Model to train instead of open-diffusion's own."""
    overwrite: bool = False
    """Whether an existing file may be replaced."""

    def __post_init__(self) -> None:
        check_least("ranks", self.ranks, 1, "it counts processes.")
        if self.behaviour not in (None, *BEHAVIOURS):
            raise ConfigError(f"behaviour={self.behaviour} is unknown: choose {' or '.join(BEHAVIOURS)}.")


def import_recipe(args: ImportArgs) -> int:
    """Write the experiment, print its command and what has no equivalent, and return 0.

    Raises:
        ConfigError: a file that cannot be read or is of no known trainer, a refused filter, or an `out` that is taken.
    """
    out = Path(args.out)
    if out.suffix != ".yaml" or out.parent.name != "experiment":
        raise ConfigError(f"out={args.out} must be named experiment/<name>.yaml, in a folder that --config-dir names.")
    if out.exists() and not args.overwrite:
        raise ConfigError(f"out={args.out} exists. Choose another name, or replace it by overwrite=true.")
    recipe = translate(read_source(Path(args.source)), args)
    command = f"cascade-train --config-dir {out.absolute().parents[1]} experiment={out.stem}"
    out.parent.mkdir(parents=True, exist_ok=True)
    shown = f"cascade-train --config-dir {out.parents[1]} experiment={out.stem}"
    out.write_text(recipe.text(title=f"Imported from {printable(Path(args.source).name)}.", command=shown))
    print(f"Wrote {out}. Run it: {command}")
    for line in recipe.report():
        print(f"  {printable(line)}")
    return 0


def read_source(path: Path) -> dict[str, Any]:
    """Return the nested values of a YAML file; interpolations are resolved where they can be.

    Raises:
        ConfigError: it is not there, too large, no YAML, or no mapping.
    """
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{path} is no file of at most {MAX_BYTES} bytes. Name a training configuration.")
    source = OmegaConf.to_container(load_yaml(path), resolve=False)
    if isinstance(source, dict):
        return resolved(source)
    raise ConfigError(f"{path} holds no keys and values. Name a training configuration.")


def resolved(source: dict[Any, Any]) -> dict[str, Any]:
    """Return plain values, `???` where an interpolation leads to nothing, too far, or to more than one value.

    No resolver is run. Each reference is followed once, and the size of its value is bounded.
    """
    found: dict[str, Any] = {}

    def referred(key: str, depth: int) -> Any:
        if key not in found:
            found[key] = MISSING  # what leads to itself leads to nothing
            value: Any = source
            for name in key.split("."):
                value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
            found[key] = MISSING if isinstance(value, dict | list) else plain(value, depth + 1)
        return found[key]

    def plain(node: Any, depth: int = 0) -> Any:
        if isinstance(node, dict):
            return {str(key): plain(value) for key, value in node.items()}
        if not isinstance(node, str) or "${" not in node:
            return node
        if depth > MAX_REFERENCES or node.count("${") > MAX_REFERENCES:
            return MISSING
        values = {each[1]: referred(each[1], depth) for each in REFERENCE.finditer(node)}
        whole = REFERENCE.fullmatch(node)
        if whole is not None:
            return values[whole[1]]
        text = REFERENCE.sub(lambda each: str(values[each[1]])[: LONGEST + 1], node)
        return MISSING if "${" in text or MISSING in values.values() or len(text) > LONGEST else text

    return {str(key): plain(value) for key, value in source.items()}


def translate(source: dict[str, Any], args: ImportArgs) -> Recipe:
    """Return what a configuration means here.

    Raises:
        ConfigError: it is of no known trainer, or one of its row filters is refused.
    """
    from cascade_train.data.index.row_filter import parse_row_filters  # heavy: numpy

    recipe: Recipe | None = None
    try:
        if is_official(source):
            recipe = from_official(source, ranks=args.ranks, behaviour=args.behaviour or "original")
        elif is_open_diffusion(source) and args.behaviour == "original":
            raise ConfigError(
                "behaviour=original is for files of Stable Cascade; open-diffusion trains another network."
            )
        elif is_open_diffusion(source):
            recipe = from_open_diffusion(source, ranks=args.ranks, model=args.model)
    except ConfigError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{args.source} holds a value of another type than its trainer reads: {error}.") from error
    if recipe is None:
        raise ConfigError(
            f"{args.source} is neither a training file of Stable Cascade (experiment_id, model_version) nor one of"
            " open-diffusion (system, experiment, dataset)."
        )
    try:
        parse_row_filters(recipe.values.get("data.row_filters"))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    recipe.leave_out_unknown()
    return recipe


COMMAND = {
    "import": Command(
        arguments=ImportArgs,
        run=import_recipe,
        usage="import FILE out=<folder>/experiment/<name>.yaml",
        words=("from",),
    )
}
