"""The demo, judged: does the new token show its concept, and is the rest as it was?

    make demo
    python bench/demo.py --run runs/demo/sides --out bench/results/demo.md

Scenes that no training picture showed, painted from their captions by Stage C, B and A of the package (before) and with
the run's adapters and token in Stage C (after); `shapes_judge` reads what the pictures show. Ends with 1 where a target
is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.shapes_judge import accuracies
from bench.tiny_cascade import Truth, commit, from_captions, shapes, table, trained_on, unseen
from cascade_train.config.saved import to_plain
from cascade_train.engine.sampling import compose_grid
from cascade_train.results.find import find_model

BASE = "package:tiny"
LEAST_AFTER = 0.8
"""Share of the concept's pictures that must show it after; before, none may."""

UNHARMED = ("colour", "position", "background")
MOST_LOST = 0.05
"""By how much their accuracy on other prompts may fall."""

SHOWN = (4, 3)
"""Pictures of the concept and of other prompts in the grid."""

Pictures = list[np.ndarray]
Table = dict[str, dict[str, float]]


def new_scenes(cfg: DictConfig, count: int) -> Truth:
    """Return scenes of the concept that the run did not see."""
    return unseen([shapes(to_plain(cfg.data.source), cfg.model.image_size)], count)


def other_scenes(cfg: DictConfig, count: int) -> Truth:
    """Return scenes of what the packaged Stage C knows, seen neither by it nor by the run."""
    known = trained_on(find_model(BASE, key="from", part="prior").cfg)
    return unseen([known, shapes(to_plain(cfg.data.regularisation), cfg.model.image_size)], count)


def prompts(truth: Truth, names: Mapping[str, str]) -> list[str]:
    """Return the scenes' captions in the run's words."""
    return [scene.renamed(names).sentence() for scene in truth.scenes]


def paint(source: str, decoder: str | None, captions: Sequence[str], seed: int) -> Pictures:
    """Paint one picture for each caption."""
    with tempfile.TemporaryDirectory() as folder:
        return from_captions(source, decoder, captions, seed, Path(folder))


def judged(truth: Truth, others: Truth, pictures: Mapping[str, Pictures]) -> tuple[Table, Table]:
    """Return the accuracies of the concept's pictures and of the others, which follow them."""
    count = len(truth.scenes)
    unit = {name: [picture / 255 for picture in given] for name, given in pictures.items()}
    new = {name: accuracies(given[:count], truth.scenes) for name, given in unit.items()}
    return new, {name: accuracies(given[count:], others.scenes) for name, given in unit.items()}


def missed(new: Table, rest: Table) -> list[str]:
    """Return what falls short of the targets, in words."""
    found = []
    if new["before"]["position"] > 0:
        found.append(f"the concept is in {new['before']['position']:.0%} of the pictures before")
    if new["after"]["position"] < LEAST_AFTER:
        found.append(f"the concept is in {new['after']['position']:.0%} of the pictures after")
    lost = {name: rest["before"][name] - rest["after"][name] for name in UNHARMED}
    return found + [f"{name} lost {100 * by:.1f} points" for name, by in lost.items() if by > MOST_LOST]


def page(args: argparse.Namespace, counts: tuple[int, int], new: Table, rest: Table, steps: int) -> list[str]:
    """Return the lines of the page."""
    named = ", ".join(UNHARMED)
    return [
        "# The demo, judged",
        "",
        f"`python bench/demo.py --run {args.run} --count {args.count} --others {args.others}`,",
        f"commit {commit()}, {datetime.now(UTC):%Y-%m-%d}; {steps} training steps.",
        "",
        "The token [sides] stands for the object twice, on the left and on the right. No picture that any part of the",
        "tiny cascade was trained on had two objects, those of Stage A and B included, which decode these at 96 px.",
        "",
        f"Accuracy in percent on {counts[0]} captions with [sides], of scenes that the run never saw. The position is",
        f"right where the judge finds both objects (targets: none before, {100 * LEAST_AFTER:.0f} % after):",
        "",
        *table(new, targets={}),
        "",
        f"On {counts[1]} captions without it, of scenes that neither Stage C nor the run saw (targets: {named} fall by",
        f"at most {100 * MOST_LOST:.0f} points):",
        "",
        *table(rest, targets={}),
        "",
        "In rows named `preview` Stage C's previewer decodes; in the others Stage B and A do.",
    ]


def grid(truth: Truth, others: Truth, captions: Sequence[str], pictures: Mapping[str, Pictures]) -> Image.Image:
    """Return the first pictures of both kinds, before and after."""
    rows = [*range(SHOWN[0]), *range(len(truth.scenes), min(len(truth.scenes) + SHOWN[1], len(captions)))]
    columns = {name: [Image.fromarray(pictures[name][row]) for row in rows] for name in ("before", "after")}
    return compose_grid([captions[row] for row in rows], columns)


def main(argv: Sequence[str] | None = None) -> int:
    """Paint, judge, print the page, write it if told, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="of experiment=tiny_token")
    parser.add_argument("--count", type=int, default=32, help="of pictures of the concept")
    parser.add_argument("--others", type=int, default=100, help="of other pictures")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--out", type=Path, help="where the page is written, a grid of pictures beside it")
    args = parser.parse_args(argv)
    cfg = find_model(args.run, key="run", part="network").cfg
    truth, others = new_scenes(cfg, args.count), other_scenes(cfg, args.others)
    captions = prompts(truth, to_plain(cfg.data.source.names)) + others.captions
    ways = {
        "before": (BASE, BASE),
        "after": (args.run, BASE),
        "before, preview": (BASE, None),
        "after, preview": (args.run, None),
    }
    pictures = {name: paint(source, decoder, captions, args.seed) for name, (source, decoder) in ways.items()}
    new, rest = judged(truth, others, pictures)
    text = "\n".join(page(args, (args.count, args.others), new, rest, cfg.train.max_steps)) + "\n"
    short = missed(new, rest)
    print(text, *short, sep="\n")
    if args.out is not None:
        args.out.write_text(text)
        grid(truth, others, captions, pictures).save(args.out.with_suffix(".png"))
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
