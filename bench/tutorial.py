"""What the trainings of docs/tutorial.md took and learned, and the pictures of that page.

    python bench/tutorial.py --out bench/results/tutorial.md --images docs/images

in the folder in which the page's commands ran: reads `emoji/` and `runs/emoji_*`, paints from captions, and looks
for each painted picture among the true ones. Numbers on the page come from what this writes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.soak import commit
from bench.tiny_cascade import painted
from cascade_train.commands.generate import GenerateArgs, generate
from cascade_train.config.saved import load_saved_config

STAGES = {"compressor": "compressor and previewer", "c": "C", "a": "A", "b": "B"}
MEASURES = {"a": ("psnr", "dB"), "compressor": ("psnr", "dB"), "c": ("loss", "loss")}
"""What each run validates on held-out pictures."""

RECONSTRUCTED = {"compressor": "compressor and previewer", "a": "A", "b": "B and A"}
SAID = ("emoji/inspect.txt", "emoji/plan.txt")
SETS = ("train", "held_out", "combinations")
CELL_PX, LABEL_PX, TITLE_PX = 80, 86, 36
COMPARED_PX = 32
"""Side at which pictures are compared."""

SHOWN = {
    "train": ("red heart", "green apple", "flag of Japan", "pizza", "clown face", "tiger face", "rocket", "crying cat"),
    "held_out": ("blue circle", "blue book", "woman singer", "confused face", "fox", "popcorn", "bus stop", "brain"),
    "combinations": (
        *("red apple", "blue heart", "orange square", "green book"),
        *("woman firefighter", "man mechanic", "black cat", "two-thirty"),
    ),
}
"""Captions on the page, chosen before anything was painted."""


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Captioned pictures: `images_NHW3` (N, H, W, 3) uint8, at the size that the models train at."""

    captions: tuple[str, ...]
    images_NHW3: np.ndarray

    def of(self, captions: Sequence[str]) -> np.ndarray:
        """Return the pictures of captions, in their order."""
        return self.images_NHW3[[self.captions.index(caption) for caption in captions]]


def read_pictures(folder: Path, side: int) -> Pictures:
    """Read a folder of pictures with captions beside them."""
    files = sorted(folder.glob("*.png"))
    images = [np.asarray(Image.open(file).convert("RGB").resize((side, side))) for file in files]
    return Pictures(
        captions=tuple(file.with_suffix(".txt").read_text().strip() for file in files), images_NHW3=np.stack(images)
    )


def rows_of(run: Path) -> list[dict[str, float]]:
    """Return the metrics of a run, one for each step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def training_line(name: str, run: Path) -> str:
    """Return the line of a run in the table of trainings; its minutes are those at the median speed, without pauses."""
    rows = [row for row in rows_of(run) if row["step"]]
    batch = rows[-1]["samples_seen"] // len(rows)
    speed = float(np.median([row["images_per_second"] for row in rows if row["images_per_second"]]))
    near = max(1, len(rows) // 50)
    first, last = (float(np.mean([row["loss_raw"] for row in part])) for part in (rows[:near], rows[-near:]))
    cells = [STAGES[name], f"{len(rows)} x {batch}", f"{len(rows) * batch / speed / 60:.0f}", f"{speed:.0f}"]
    return f"| {' | '.join(cells)} | {first:.4f} | {last:.4f} | {validated(name, rows)} |"


def validated(name: str, rows: Sequence[Mapping[str, float]]) -> str:
    """Return what a run measured on held-out pictures: first, half-way and last."""
    if name not in MEASURES:
        return ""
    measure, unit = MEASURES[name]
    found = [row[f"validate/{measure}"] for row in rows if f"validate/{measure}" in row]
    return f"{found[0]:.2f}, {found[(len(found) - 1) // 2]:.2f}, {found[-1]:.2f} {unit}"


def reconstructions(judged: Path, truth: Pictures, captions: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the held-out pictures of captions as each of three stages gave them back, by the words for it."""
    rows = {"the emoji": truth.of(captions)}
    for name, title in RECONSTRUCTED.items():
        files = [judged / f"{name}_held_out/pictures/{truth.captions.index(each):06d}.png" for each in captions]
        rows[title] = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    return rows


def paint(captions: Sequence[str], folder: Path, **stages: object) -> np.ndarray:
    """Paint captions, or reconstruct pictures, unless the folder holds them; return (N, H, W, 3) uint8."""
    if not (folder / f"{len(captions) - 1:02d}_00.png").is_file():
        generate(GenerateArgs(prompts=[*captions], batch_size=50, out=str(folder), **stages))  # type: ignore[arg-type]
    return np.stack(painted(folder, len(captions)))


def distances(found_NHW3: np.ndarray, among_MHW3: np.ndarray) -> np.ndarray:
    """Return the mean squared difference of each of N pictures to each of M, at a small size, (N, M)."""
    found_NP, among_MP = (
        np.stack([np.asarray(Image.fromarray(image).resize((COMPARED_PX, COMPARED_PX))) for image in images])
        .reshape(len(images), -1)
        .astype(np.float32)
        / 255
        for images in (found_NHW3, among_MHW3)
    )
    squares_NM = (found_NP**2).sum(1)[:, None] + (among_MP**2).sum(1)[None] - 2 * found_NP @ among_MP.T
    return squares_NM / found_NP.shape[1]


def retrieval_line(name: str, found: np.ndarray, truth: Pictures, captions: Sequence[str]) -> str:
    """Return how often the true picture is the nearest, or among the five nearest, of its set."""
    places = np.array([truth.captions.index(caption) for caption in captions])
    distance_NM = distances(found, truth.images_NHW3)
    own_N = distance_NM[np.arange(len(places)), places]
    rank_N = (distance_NM < own_N[:, None]).sum(axis=1)
    chance = 100 / len(truth.captions)
    shares = [100 * float((rank_N < best).mean()) for best in (1, 5)]
    return f"| {name} | {len(captions)} | {shares[0]:.0f} | {shares[1]:.0f} | {chance:.1f}, {5 * chance:.1f} |"


def last_grid(run: Path, count: int) -> dict[str, np.ndarray]:
    """Return the pictures of a run's last grid of samples, (N, H, W, 3) uint8, by whose weights painted them."""
    folder = max((run / "samples").iterdir(), key=lambda path: int(path.name.removeprefix("step_")))
    kinds = {"the weights": "sample", "their average": "ema_sample"}
    return {
        title: np.stack(
            [np.asarray(Image.open(folder / f"{row:02d}_{kind}.png").convert("RGB")) for row in range(count)]
        )
        for title, kind in kinds.items()
    }


def shown(
    captions: Sequence[str], whole: np.ndarray, preview: np.ndarray, truth: Pictures, train: Pictures
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return rows of pictures for the first captions, and the names of the training pictures nearest to them."""
    count = len(captions)
    near = distances(preview[:count], train.images_NHW3).argmin(axis=1)
    rows = {
        "the emoji": truth.of(captions),
        "C and its previewer": preview[:count],
        "C, B and A": whole[:count],
        "nearest in training": train.images_NHW3[near],
    }
    return rows, [train.captions[place] for place in near]


def sheet(captions: Sequence[str], rows: Mapping[str, np.ndarray]) -> Image.Image:
    """Return one picture: a column for each caption, a titled row for each kind."""
    image = Image.new("RGB", (LABEL_PX + CELL_PX * len(captions), TITLE_PX + CELL_PX * len(rows)), "white")
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(size=11)
    for column, caption in enumerate(captions):
        canvas.multiline_text((LABEL_PX + CELL_PX * column + 3, 4), wrapped(caption), fill="black", font=font)
    for row, (title, pictures) in enumerate(rows.items()):
        top = TITLE_PX + CELL_PX * row
        canvas.multiline_text((3, top + 24), wrapped(title), fill="black", font=font)
        for column, picture in enumerate(pictures):
            small = Image.fromarray(picture).resize((CELL_PX - 4, CELL_PX - 4))
            image.paste(small, (LABEL_PX + CELL_PX * column, top))
    return image


def wrapped(text: str) -> str:
    """Return a text in lines of few letters."""
    lines = [""]
    for word in text.split():
        lines = [*lines[:-1], f"{lines[-1]} {word}".strip()] if len(lines[-1] + word) < 13 else [*lines, word]
    return "\n".join(lines)


def evaluations(work: Path) -> list[str]:
    """Return a line for each reconstruction that `cascade-train evaluate` measured."""
    lines = []
    for name in RECONSTRUCTED:
        found = {}
        for part in ("train", "held_out"):
            found[part] = json.loads((work / f"runs/judged/{name}_{part}/metrics.json").read_text())
        pairs = [f"{found[part]['measures']['psnr']:.1f} | {found[part]['measures']['ssim']:.2f}" for part in found]
        lines.append(f"| {RECONSTRUCTED[name]} | {' | '.join(pairs)} |")
    return lines


def data_lines(work: Path, truth: Mapping[str, Pictures]) -> list[str]:
    """Return how many pictures and tokens there are, and what `inspect` and `plan` said."""
    counts = ", ".join(f"{len(pictures.captions)} {part}" for part, pictures in truth.items())
    vocabulary = json.loads((work / "emoji/tokenizer/tokenizer.json").read_text())["model"]["vocab"]
    said = [line for name in SAID for line in ("", "```", *(work / name).read_text().splitlines(), "```")]
    return [f"Pictures: {counts}. Tokens of the tokenizer: {len(vocabulary)}.", *said]


def main(argv: Sequence[str] | None = None) -> int:
    """Paint, compare, print the page, write it and the pictures, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(), help="where the page's commands ran")
    parser.add_argument("--out", type=Path, required=True, help="where the page is written")
    parser.add_argument("--images", type=Path, required=True, help="folder of the pictures")
    args = parser.parse_args(argv)
    runs = {name: args.work / f"runs/emoji_{name}" for name in STAGES}
    side = load_saved_config(runs["c"]).model.image_size
    truth = {part: read_pictures(args.work / "emoji" / part, side) for part in SETS}
    judged = args.work / "runs/judged"
    retrieved, nearest = [], {}
    for part in SETS:
        # About as many training pictures as held-out ones, evenly spread.
        spread = truth[part].captions[:: max(1, len(truth[part].captions) // 80)]
        captions = list(dict.fromkeys([*SHOWN[part], *spread]))
        preview = paint(captions, judged / f"preview_{part}", source=str(runs["c"]))
        whole = paint(captions, judged / f"painted_{part}", source=str(runs["c"]), decoder=str(runs["b"]))
        for way, found in (("C, B and A", whole), ("C and its previewer", preview)):
            retrieved.append(retrieval_line(f"{part.replace('_', ' ')} | {way}", found, truth[part], captions))
        rows, nearest[part] = shown(SHOWN[part], whole, preview, truth[part], truth["train"])
        sheet(SHOWN[part], rows).save(args.images / f"tutorial_{part}.webp", quality=80)
    prompts = list(load_saved_config(runs["c"]).sample.prompts)
    sheet(prompts, last_grid(runs["c"], len(prompts))).save(args.images / "tutorial_grid.webp", quality=80)
    seen = SHOWN["held_out"]
    rows = reconstructions(judged, truth["held_out"], seen)
    sheet(seen, rows).save(args.images / "tutorial_reconstructed.webp", quality=80)
    text = "\n".join(page(runs, data_lines(args.work, truth), evaluations(args.work), retrieved, nearest)) + "\n"
    print(text)
    args.out.write_text(text)
    return 0


def page(
    runs: Mapping[str, Path],
    data: Sequence[str],
    reconstructed: Sequence[str],
    retrieved: Sequence[str],
    nearest: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return the lines of the page."""
    return [
        "# The tutorial's cascade of emoji",
        "",
        "`python bench/tutorial.py --out bench/results/tutorial.md --images docs/images`,",
        f"commit {commit()}, {datetime.now(UTC):%Y-%m-%d}; one thread on {platform.machine()}, {os.cpu_count()} cores",
        "that other programs used too. Minutes are those at the median speed, without pauses.",
        "",
        *data,
        "",
        "| trained | steps x batch | minutes | pictures/s | loss, first | last | held out: first, half-way, last |",
        "|---|---|---|---|---|---|---|",
        *(training_line(name, run) for name, run in runs.items()),
        "",
        "| reconstructed by | training: dB | SSIM | held out: dB | SSIM |",
        "|---|---|---|---|---|",
        *reconstructed,
        "",
        "| captions of | painted by | painted | own picture nearest, % | among 5 nearest, % | by chance |",
        "|---|---|---|---|---|---|",
        *retrieved,
        "",
        *(f"Nearest training pictures, {part}: {', '.join(names)}." for part, names in nearest.items()),
    ]


if __name__ == "__main__":
    sys.exit(main())
