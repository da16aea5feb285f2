"""Import a training file of Stable Cascade's own trainer as an experiment.

cascade-train recipe import finetune_c_3b.yaml out=conf-dir/experiment/name.yaml
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from cascade_train.commands.parts.command_line import Command
from cascade_train.config.official import BEHAVIOURS, translate
from cascade_train.errors import ConfigError
from cascade_train.files.output import check_output, replaced_file
from cascade_train.files.untrusted import MAX_BYTES, load_mapping
from cascade_train.options import check_choice, check_least
from cascade_train.redaction import printable, redact_argument


@dataclass(kw_only=True)
class ImportArgs:
    """Import a training file of the original as an experiment, and say what became of each of its keys."""

    source: str
    """The file, one of Stable Cascade's configs/training/*.yaml."""
    out: str
    """What to write: experiment/<name>.yaml in a folder of yours, which --config-dir names."""
    ranks: int = 1
    """Processes that it will run on: the original counts samples per process."""
    behaviour: str = "original"
    """What applies where the file is silent: original, what its trainer does; or ours."""
    overwrite: bool = False
    """Whether an existing file may be replaced."""

    def __post_init__(self) -> None:
        check_least("ranks", self.ranks, 1, "it counts processes.")
        check_choice("behaviour", self.behaviour, BEHAVIOURS)


def import_recipe(args: ImportArgs) -> int:
    """Write the experiment, print its command and what became of each key, and return 0."""
    source, out = Path(args.source), Path(args.out)
    if out.suffix != ".yaml" or out.parent.name != "experiment":
        raise ConfigError(f"out={args.out} must be named experiment/<name>.yaml, in a folder that --config-dir names.")
    check_output(out, "recipe", inputs=[args.source], overwrite=args.overwrite)
    recipe = translate(load_mapping(source, args.source, MAX_BYTES), ranks=args.ranks, behaviour=args.behaviour)
    near, far = (
        printable(f"cascade-train --config-dir {shlex.quote(str(path.parents[1]))} experiment={shlex.quote(out.stem)}")
        for path in (out, out.absolute())
    )
    text = recipe.text(title=f"Imported from {printable(source.name)}.", command=near)
    with replaced_file(out) as place:
        place.write_text(text, encoding="utf-8")
    print(f"Wrote {out}. Run it: {far}")
    for line in recipe.report():
        keys, colon, rest = line.partition(": ")
        print(printable(f"{keys}{colon}{redact_argument(rest)}"))
    return 0


USAGE = "import FILE out=<folder>/experiment/<name>.yaml"
COMMAND = {"import": Command(arguments=ImportArgs, run=import_recipe, usage=USAGE, words=("from",))}
