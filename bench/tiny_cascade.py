"""What the tiny cascade paints, judged: does a picture show what its caption says?

    python bench/tiny_cascade.py --prior runs/tiny/c --decoder runs/tiny/b --out bench/results/tiny_cascade.md

Captions of scenes that no training picture of Stage C or B showed go through C, B and A; `shapes_judge` reads what the
pictures show. Beside it: the judge on the procedure's own pictures of those scenes, Stage C's previews, and Stage B
alone on the procedure's pictures, with the PSNR of its reconstructions and of its conditioning brought back
bilinearly. Ends with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.shapes_judge import ATTRIBUTES, accuracies
from bench.soak import commit
from cascade_train.commands.generate import GenerateArgs, generate
from cascade_train.config.saved import to_plain
from cascade_train.data.cached import read_manifest
from cascade_train.data.shapes import Scene, Shapes
from cascade_train.engine.sampling import compose_grid
from cascade_train.models.cascade.convolutional import ConvolutionalCompressor
from cascade_train.models.image_quality import ReconstructionQuality
from cascade_train.results.find import find_model

TARGETS = dict.fromkeys(ATTRIBUTES, 0.95)
"""Least accuracy of pictures from captions."""

TARGET_DB = 3.0
"""By how many decibels Stage B's reconstructions must beat the bilinear baseline."""

DRAWN_BY = ("samples", "seed", "only")
HELD_OUT_SEED = 1_000_003
"""Of the pictures among which unseen scenes are looked for."""

LOOKED_AT = 100_000
"""How many scenes are drawn to find unseen ones."""

SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Scenes that no training picture showed.

    Attributes:
        scenes: what is asked for.
        pictures: the procedure's own, (H, W, 3) uint8.
    """

    scenes: tuple[Scene, ...]
    pictures: tuple[np.ndarray, ...]

    @property
    def captions(self) -> list[str]:
        """One for each scene, complete."""
        return [scene.sentence() for scene in self.scenes]


def shapes(options: Mapping[str, object], image_size: int, **changes: object) -> Shapes:
    """Return the pictures of a run's `data` node, with changes."""
    known = {key: options[key] for key in DRAWN_BY}
    loading = {"crop": "center", "shuffle_window_shards": 1, "num_workers": 0, "worker_start": "fork"}
    return Shapes(image_size=image_size, **{**known, **loading, **changes})


def trained_on(cfg: DictConfig) -> Shapes:
    """Return the pictures that a run saw, or that its cache was made of."""
    options = to_plain(cfg.data)
    if "path" in options:
        made_from = read_manifest(Path(options["path"])).identity
        options |= {key: made_from[f"data.{key}"] for key in DRAWN_BY}
    return shapes(options, cfg.model.image_size)


def unseen(seen_before: Sequence[Shapes], count: int) -> Truth:
    """Draw scenes of the first one's words that are among nobody's training pictures, each once.

    Raises:
        ValueError: hardly any are left.
    """
    seen = {pictures.scene(row) for pictures in seen_before for row in range(pictures.samples)}
    others = replace(seen_before[0], seed=HELD_OUT_SEED)  # rows beyond its number of samples can be drawn, too
    found: dict[Scene, np.ndarray] = {}
    for row in range(LOOKED_AT):
        scene = others.scene(row)
        if scene not in seen and scene not in found:
            found[scene] = np.asarray(others.draw(row)[2])
        if len(found) == count:
            return Truth(scenes=tuple(found), pictures=tuple(found.values()))
    raise ValueError(f"only {len(found)} of {LOOKED_AT} scenes are none of those trained on")


def painted(folder: Path, count: int) -> list[np.ndarray]:
    """Read what `generate` wrote, one picture for each prompt, (H, W, 3) uint8."""
    pictures = []
    for number in range(count):
        with Image.open(folder / f"{number:02d}_00.png") as file:
            pictures.append(np.asarray(file.convert("RGB")))
    return pictures


def from_captions(
    prior: str, decoder: str | None, captions: Sequence[str], seed: int, folder: Path
) -> list[np.ndarray]:
    """Paint each caption by C, B and A; without a decoder, by C and its previewer."""
    generate(
        GenerateArgs(source=prior, decoder=decoder, prompts=[*captions], seed=seed, batch_size=50, out=str(folder))
    )
    return painted(folder, len(captions))


def from_pictures(decoder: str, truth: Truth, seed: int, folder: Path) -> list[np.ndarray]:
    """Reconstruct each picture by B and A from its semantic latents, without its caption."""
    files = []
    for number, picture in enumerate(truth.pictures):
        files.append(folder / f"truth_{number}.png")
        Image.fromarray(picture).save(files[-1])
    images = [str(file) for file in files]
    generate(GenerateArgs(source=decoder, image=images, seed=seed, batch_size=50, out=str(folder)))
    return painted(folder, len(files))


def decibels(reconstructions: Sequence[np.ndarray], truth: Truth, stride: int) -> tuple[float, float]:
    """Return the mean PSNR of reconstructions, and of the bilinear baseline at the compressor's stride."""
    image, original = (
        torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255 for pictures in (reconstructions, truth.pictures)
    )
    found = ReconstructionQuality(multiple=stride, lpips=None)(image, original)
    return found["psnr"].mean().item(), found["psnr_bilinear"].mean().item()


def table(rows: Mapping[str, Mapping[str, float]], targets: Mapping[str, float] = TARGETS) -> Iterator[str]:
    """Yield the lines of a table of accuracies in percent, with a row of the targets if there are any."""
    columns = (*ATTRIBUTES, "all")
    yield "| | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    if targets:
        least = (f"{100 * targets[column]:.0f}" if column in targets else "" for column in columns)
        yield "| target | " + " | ".join(least) + " |"
    for name, found in rows.items():
        yield f"| {name} | " + " | ".join(f"{100 * found[column]:.1f}" for column in columns) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    """Paint, judge, print the page, write it if told, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prior", required=True, help="a run of Stage C on data=shapes, or its export")
    parser.add_argument("--decoder", required=True, help="a run of Stage B, or its export")
    parser.add_argument("--count", type=int, default=200, help="of scenes")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--out", type=Path, help="where the page is written, a grid of pictures beside it")
    args = parser.parse_args(argv)
    prior = find_model(args.prior, key="prior", part="prior").cfg
    decoder = find_model(args.decoder, key="decoder", part="decoder").cfg
    truth = unseen([trained_on(cfg) for cfg in (prior, decoder)], args.count)
    with tempfile.TemporaryDirectory() as folder:
        captioned, previewed, pictured = (Path(folder) / name for name in ("captions", "previews", "pictures"))
        for each in (captioned, previewed, pictured):
            each.mkdir()
        chain = from_captions(args.prior, args.decoder, truth.captions, args.seed, captioned)
        previews = from_captions(args.prior, None, truth.captions, args.seed, previewed)
        alone = from_pictures(args.decoder, truth, args.seed, pictured)
    judged = {
        "the judge on true pictures": truth.pictures,
        "C, B and A from captions": chain,
        "C alone from captions, as its previewer shows it": previews,
        "B and A from pictures": alone,
    }
    rows = {name: accuracies([p / 255 for p in pictures], truth.scenes) for name, pictures in judged.items()}
    found, bilinear = decibels(alone, truth, ConvolutionalCompressor.stride)
    text = "\n".join(page(args, rows, found, bilinear)) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text)
        columns = {"from its caption": chain, "preview": previews, "from its picture": alone, "drawn": truth.pictures}
        images = {
            name: [Image.fromarray(picture) for picture in pictures[:SHOWN]] for name, pictures in columns.items()
        }
        compose_grid(truth.captions[:SHOWN], images).save(args.out.with_suffix(".png"))
    reached = rows["C, B and A from captions"]
    return int(found - bilinear < TARGET_DB or any(reached[name] < least for name, least in TARGETS.items()))


def page(args: argparse.Namespace, rows: Mapping[str, Mapping[str, float]], found: float, bilinear: float) -> list[str]:
    """Return the lines of the page."""
    return [
        "# The tiny cascade, judged",
        "",
        f"`python bench/tiny_cascade.py --prior {args.prior} --decoder {args.decoder} --count {args.count}`,",
        f"commit {commit()}, {datetime.now(UTC):%Y-%m-%d}.",
        "",
        f"Accuracy in percent on {args.count} scenes that no training picture of Stage C or B showed:",
        "",
        *table(rows),
        "",
        f"Reconstructions by Stage B and A, from semantic latents alone: {found:.1f} dB. Means over the compressor's",
        f"squares, brought back bilinearly: {bilinear:.1f} dB. Target: {TARGET_DB:.0f} dB more.",
    ]


if __name__ == "__main__":
    sys.exit(main())
