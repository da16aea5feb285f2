"""Write a run's result for other programs from one of its checkpoints: `python -m cascade_train.export from=runs/x`.

A run that ends writes its export itself; this verb serves runs that have not ended. Formats live in models/.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from cascade_train.config.explain import exit_code
from cascade_train.config.saved import load_saved_config
from cascade_train.config.verb import parse_verb


@dataclass(kw_only=True)
class ExportArgs:
    """Arguments of `python -m cascade_train.export`."""

    source: str
    """Folder of a run."""
    step: int | None = None
    """Checkpoint to export; null = the newest whole one."""
    out: str | None = None
    """Folder to write; null = `<run>/export`."""


def export(args: ExportArgs) -> int:
    """Write what the run's task leaves behind, read back and compared; return 0.

    Raises:
        ConfigError: no run at `from=`, or no such checkpoint.
        RunError: what was written reads back differently.
    """
    run = Path(args.source)
    cfg = load_saved_config(run)
    out = run / "export" if args.out is None else Path(args.out)

    from cascade_train.trained import export_checkpoint  # heavy: torch and everything above it

    checkpoint = export_checkpoint(cfg, run / "checkpoints", step=args.step, out=out)
    sys.stdout.write(f"{checkpoint.name} of {run} is exported to {out}\n")
    return 0


def main() -> None:
    """Parse the arguments, export, and exit: 0 done, 1 stopped by the world, 2 refused."""
    sys.exit(exit_code(lambda: export(parse_verb(ExportArgs, sys.argv[1:]))))


if __name__ == "__main__":
    main()
