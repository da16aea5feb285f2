"""What the tiny Stable Diffusions paint, judged: does a picture show what its caption says?

    python bench/tiny_stable_diffusion.py --sd runs/tiny_sd/sd --sdxl runs/tiny_sd/sdxl --out judged.md

Captions of scenes that no training picture of either network showed go through both; `shapes_judge` reads what the
pictures show. Beside it: the judge on the procedure's own pictures of those scenes, and on what their autoencoder keeps
of them. Ends with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.shapes_judge import accuracies
from bench.tiny_cascade import SHOWN, Truth, commit, from_captions, table, trained_on, unseen
from cascade_train.assembly.build import build_node
from cascade_train.engine.sampling import compose_grid
from cascade_train.results.find import find_model

FAMILIES = {"sd": "Stable Diffusion", "sdxl": "Stable Diffusion XL"}
"""Argument that names a network -> what its pictures are called."""

TARGETS = {"colour": 0.9, "background": 0.9, "shape": 0.8, "position": 0.8}
"""Least accuracy of pictures from captions, at 32 px."""

OTHERS = {"judge": "the judge on true pictures", "vae": "the autoencoder on them"}

Pictures = Sequence[np.ndarray]


def through_autoencoder(cfg: DictConfig, pictures: Pictures) -> list[np.ndarray]:
    """Return what the autoencoder of a model keeps of pictures, (H, W, 3) uint8 each."""
    vae = build_node(cfg.model.vae)
    vae.build(device=torch.device("cpu"))
    images = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255
    made = vae.decode(vae.encode(images)).clamp(0, 1)
    return list((255 * made).round().byte().permute(0, 2, 3, 1).numpy())


def page(args: argparse.Namespace, cfg: DictConfig, rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines of the page."""
    given = " ".join(f"--{name} {getattr(args, name)}" for name in FAMILIES)
    return [
        "# The tiny Stable Diffusions, judged",
        "",
        f"`python bench/tiny_stable_diffusion.py {given} --count {args.count}`,",
        f"commit {commit()}, {datetime.now(UTC):%Y-%m-%d}.",
        "",
        f"Accuracy in percent on {args.count} scenes that no training picture of either network showed, at",
        f"{cfg.model.image_size} px, in {cfg.sample.steps} steps of {cfg.sample.sampler}, guided as the recipes say:",
        "",
        *table(rows, TARGETS),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Paint, judge, print the page, write it if told, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, title in FAMILIES.items():
        parser.add_argument(f"--{name}", required=True, help=f"a run of {title} on data=shapes, or its export")
    parser.add_argument("--count", type=int, default=200, help="of scenes")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--out", type=Path, help="where the page is written, a grid of pictures beside it")
    args = parser.parse_args(argv)
    cfgs = [find_model(getattr(args, name), key=name, part="network").cfg for name in FAMILIES]
    truth = unseen([trained_on(cfg) for cfg in cfgs], args.count)
    pictures: dict[str, Pictures] = {
        OTHERS["judge"]: truth.pictures,
        OTHERS["vae"]: through_autoencoder(cfgs[0], truth.pictures),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, title in FAMILIES.items():
            (own := Path(folder) / name).mkdir()
            pictures[title] = from_captions(getattr(args, name), None, truth.captions, args.seed, own)
    rows = {name: accuracies([picture / 255 for picture in given], truth.scenes) for name, given in pictures.items()}
    text = "\n".join(page(args, cfgs[0], rows)) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text)
        grid(truth, pictures).save(args.out.with_suffix(".png"))
    return int(any(rows[title][name] < least for title in FAMILIES.values() for name, least in TARGETS.items()))


def grid(truth: Truth, pictures: Mapping[str, Pictures]) -> Image.Image:
    """Return the first scenes, painted and drawn."""
    titles = {**{title: title for title in FAMILIES.values()}, OTHERS["vae"]: "autoencoder", OTHERS["judge"]: "drawn"}
    columns = {short: [Image.fromarray(each) for each in pictures[name][:SHOWN]] for name, short in titles.items()}
    return compose_grid(truth.captions[:SHOWN], columns)


if __name__ == "__main__":
    sys.exit(main())
