"""Import another trainer's configuration as an experiment.

cascade-train recipe import config.toml out=conf-dir/experiment/name.yaml
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cascade_train.commands.parts.command_line import Command
from cascade_train.config.recipes.layouts import system_of
from cascade_train.config.recipes.official import BEHAVIOURS
from cascade_train.config.recipes.reading import read_flags, read_source
from cascade_train.config.recipes.recipe import Recipe, settle, try_out
from cascade_train.config.recipes.systems import from_source
from cascade_train.config.recipes.table import SYSTEMS
from cascade_train.errors import ConfigError
from cascade_train.files.output import check_output, replaced_file
from cascade_train.options import check_choice, check_least
from cascade_train.redaction import printable, redact_argument


@dataclass(kw_only=True)
class ImportArgs:
    """Import another trainer's configuration as an experiment, and say what became of each of its keys."""

    source: str
    """The file: of EveryDream 1 or 2, MindONE, sd-scripts, OneTrainer, SimpleTuner, open-diffusion or the original."""
    out: str
    """What to write: experiment/<name>.yaml in a folder of yours, which --config-dir names."""
    ranks: int = 1
    """Processes that it will run on, where the file counts per process."""
    behaviour: str | None = None
    """What applies where a file is silent: original, what its trainer does (null too); or ours."""
    model: str | None = None
    """Model to train in the place of the file's; null = the file's own, asked for where that is not certain."""
    system: str | None = None
    """Whose file it is, where its keys do not tell: everydream, everydream1, kohya, mindone, official, onetrainer,
    open_diffusion or simpletuner."""
    flags: str | None = None
    """What was typed behind the trainer's script, as one text: "--seed 3 --flip_aug"; goes before the file."""
    overwrite: bool = False
    """Whether an existing file may be replaced."""

    def __post_init__(self) -> None:
        check_least("ranks", self.ranks, 1, "it counts processes.")
        if self.behaviour is not None:
            check_choice("behaviour", self.behaviour, BEHAVIOURS)
        if self.system is not None:
            check_choice("system", self.system, sorted(SYSTEMS))


def import_recipe(args: ImportArgs) -> int:
    """Write the experiment, print its command and what became of each key, and return 0."""
    out = Path(args.out)
    if out.suffix != ".yaml" or out.parent.name != "experiment":
        raise ConfigError(f"out={args.out} must be named experiment/<name>.yaml, in a folder that --config-dir names.")
    check_output(out, "recipe", inputs=[args.source], overwrite=args.overwrite)
    recipe = translate(read_source(Path(args.source)), args)
    try_out(recipe, args.source, ranks=args.ranks)
    end = "".join([f" experiment={shlex.quote(out.stem)}", *(f" {group}=..." for group in sorted(recipe.asked))])
    near, far = (
        printable(f"cascade-train --config-dir {shlex.quote(str(each.parents[1]))}{end}")
        for each in (out, out.absolute())
    )
    text = recipe.text(title=f"Imported from {printable(Path(args.source).name)}.", command=near)
    with replaced_file(out) as place:
        place.write_text(text, encoding="utf-8")
    print(f"Wrote {out}. Run it: {far}")
    for line in recipe.report():
        keys, colon, text = line.partition(": ")
        print(printable(f"{keys}{colon}{redact_argument(text)}"))
    return 0


def translate(source: Any, args: ImportArgs) -> Recipe:
    """Return what a configuration means here; a ConfigError where it is of no known trainer, or a value is refused."""
    from cascade_train.data.index.row_filter import parse_row_filters  # heavy: numpy

    system = args.system or system_of(source)
    if system is None:
        raise ConfigError(
            f"{args.source} is neither a training file of Stable Cascade (experiment_id, model_version) nor one of"
            " open-diffusion (system, experiment, dataset), EveryDream, MindONE, sd-scripts, OneTrainer or"
            " SimpleTuner. Name its trainer by system=."
        )
    flags = read_flags(args.flags) if args.flags else {}
    path, fills = Path(args.source), args.behaviour != "ours"
    try:
        recipe = from_source(system, source, path=path, flags=flags, ranks=args.ranks, model=args.model, fills=fills)
        settle(recipe)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{args.source} holds a value of another type than its trainer reads: {error}.") from error
    try:
        parse_row_filters(recipe.values.get("data.row_filters"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        recipe.drop("data.row_filters", str(error))
    return recipe


USAGE = "import FILE out=<folder>/experiment/<name>.yaml"
COMMAND = {"import": Command(arguments=ImportArgs, run=import_recipe, usage=USAGE, words=("from",))}
