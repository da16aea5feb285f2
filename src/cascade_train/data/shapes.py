"""Procedural captioned pictures: an object on a plain background, the embedded default data.

Every picture and caption is a function of (seed, row, image size) alone. The captions use only words that are
one token each in the tokenizer that ships with the package.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageDraw

from cascade_train.data.index.rows import ROW_FIELDS, Index
from cascade_train.data.sample import RawSample
from cascade_train.data.source import Source
from cascade_train.data.tar.members import write_tar
from cascade_train.errors import ConfigError
from cascade_train.options import Positive, Share, check_least

COLOURS = {
    "red": (214, 40, 40),
    "green": (44, 160, 60),
    "blue": (38, 84, 214),
    "yellow": (244, 216, 50),
    "purple": (128, 50, 168),
    "orange": (244, 134, 30),
    "cyan": (60, 206, 220),
    "pink": (244, 142, 186),
    "white": (244, 244, 244),
    "black": (18, 18, 18),
    "gray": (128, 128, 128),
    "brown": (112, 68, 36),
}
SHAPES = ("circle", "square", "triangle", "cross", "star", "diamond", "ring")
RADII = {"small": 0.1, "large": 0.16}  # of the picture's side
_NINE = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
POSITIONS = {name: (number % 3, number // 3) for number, name in enumerate(_NINE)}  # column and line of `GRID`
PLACES = {"sides": ("left", "right")}
"""Several positions at once: the object is there in each. Pictures have them only where `only` names them."""

WORDS = (*COLOURS, *SHAPES, *RADII, *POSITIONS, *PLACES)
GRID = (0.22, 0.5, 0.78)  # of the columns and lines of positions, in sides of the picture
_OVERSAMPLING = 4
_DRAWS = 16
_DROP_PROB = 0.08  # for each of size, position and shape: about a quarter of the captions leave one out


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The content of a picture, in words of its caption; the background has another colour than the object."""

    colour: str
    shape: str
    size: str
    position: str
    background: str

    def renamed(self, names: Mapping[str, str]) -> Scene:
        """Scene with some words replaced."""
        return Scene(**{field: names.get(word, word) for field, word in vars(self).items()})

    def sentence(self) -> str:
        """The first form of the caption, with every word."""
        return _write_caption(self, [_DROP_PROB] * 3 + [0.0])


@dataclass(kw_only=True)
class Shapes(Source):
    """Procedural captioned pictures, drawn when they are read.

    The word `sides` of `only` puts the object on the left and on the right. A `background_weight` below 1 helps a young
    model, since objects cover a twentieth of a picture.
    """

    samples: Positive[int]
    seed: int
    only: list[str] | None = None
    names: dict[str, str] | None = None
    background_weight: Share[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("data.image_size", self.image_size, 16, "shapes need as many pixels")
        for key, words in (("only", self.only or []), ("names", list(self.names or {}))):
            for unknown in (word for word in words if word not in WORDS):
                raise ValueError(f"data.{key}: {unknown!r} is no word of a scene; choose from {', '.join(WORDS)}")

    def open(self) -> Index:
        """See `Source.open`: the index of one virtual shard."""
        table = np.zeros(self.samples, dtype=ROW_FIELDS)
        table["width"] = table["height"] = self.image_size
        keys = np.array([f"{row:07d}".encode() for row in range(self.samples)])
        return Index(shards=(self._title(),), table=table, keys=keys)

    def read(self, row: int) -> RawSample:
        """See `Source.read`: draw one picture."""
        scene, caption, picture, outline = self._draw(row)
        return RawSample(
            image=np.asarray(picture),
            caption=caption,
            key=f"{self._title()}:{row:07d}",
            values=vars(scene.renamed(self.names or {})),
            mask=self._mask(np.asarray(outline) > 0),
        )

    def _mask(self, inside_HW: np.ndarray) -> np.ndarray | None:
        """Loss weight of each pixel, 255 on the object and a twelfth of the side around it."""
        if self.background_weight == 1.0:
            return None
        near, reach = inside_HW, self.image_size // 24  # along each axis
        for _ in range(2):
            padded = np.pad(near, ((reach, reach), (0, 0)))
            near = np.logical_or.reduce([padded[first : first + len(near)] for first in range(2 * reach + 1)]).T
        return np.where(near, np.uint8(255), np.uint8(round(255 * self.background_weight)))

    def _title(self) -> str:
        names = [f"{word}={name}" for word, name in (self.names or {}).items()]
        return "-".join([f"shapes-seed{self.seed}", *sorted(self.only or []), *sorted(names)])

    def scene(self, row: int) -> Scene:
        """Content of a picture, in an eighth of the time that `draw` takes."""
        return _draw_scene(_uniform(self.seed, row), self.only or ())

    def draw(self, row: int) -> tuple[Scene, str, Image.Image]:
        """Content of a picture, its caption, and the picture, image_size square in RGB."""
        return self._draw(row)[:3]

    def _draw(self, row: int) -> tuple[Scene, str, Image.Image, Image.Image]:
        """Return what `draw` does, and the object's soft outline."""
        draws = _uniform(self.seed, row)
        scene = _draw_scene(draws, self.only or ())
        caption = _write_caption(scene.renamed(self.names or {}), draws[5:10])
        outline = _outline_mask(scene, draws[10:], self.image_size)
        return scene, caption, _draw_picture(scene, draws[10:], outline), outline


def _uniform(seed: int, row: int) -> list[float]:
    """Draw the numbers in [0, 1) that determine one picture: words of Philox, which NumPy keeps frozen."""
    digest = hashlib.blake2b(f"shapes/{seed}/{row}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=np.frombuffer(digest, dtype="<u8")).random_raw(_DRAWS)
    return [int(word) / 2**64 for word in words >> np.uint64(11) << np.uint64(11)]


def _choose(options: Sequence[str], draw: float) -> str:
    return options[int(draw * len(options))]


def _draw_scene(draws: list[float], only: Collection[str]) -> Scene:
    words: tuple[Iterable[str], ...] = (COLOURS, SHAPES, RADII, POSITIONS)
    options = [[word for word in words_of if word in only] or list(words_of) for words_of in words]
    options[3] = [place for place in (*POSITIONS, *PLACES) if place in only] or list(POSITIONS)
    colour, shape, size, position = (_choose(words_of, draw) for words_of, draw in zip(options, draws, strict=False))
    background = _choose([name for name in COLOURS if name != colour], draws[4])
    return Scene(colour=colour, shape=shape, size=size, position=position, background=background)


def _write_caption(scene: Scene, draws: list[float]) -> str:
    """Describe the scene in one of several forms, now and then without size, position or shape."""
    keep_size, keep_position, keep_shape = (draw >= _DROP_PROB for draw in draws[:3])
    words = ([scene.size] if keep_size else []) + [scene.colour, scene.shape if keep_shape else "shape"]
    thing = " ".join(words)
    article = "an" if thing[0] in "aeiou" else "a"
    preposition = "on" if scene.position in ("left", "right") else "in" if scene.position == "center" else "at"
    place = f" {preposition} the {scene.position}" if keep_position else ""
    ground = ("an " if scene.background[0] in "aeiou" else "a ") + f"{scene.background} background"
    forms = (
        f"{article} {thing}{place} on {ground}",
        f"{article} {thing}{place} with {ground}",
        f"a photo of {article} {thing}{place} on {ground}",
        f"{thing}{place} on {ground}",
        f"{ground} and {article} {thing}{place}",
        f"on {ground} {article} {thing}{place}",
    )
    return _choose(forms, draws[3])


def _draw_picture(scene: Scene, draws: list[float], outline: Image.Image) -> Image.Image:
    front = Image.new("RGB", outline.size, _vary_brightness(scene.colour, draws[4]))
    back = Image.new("RGB", outline.size, _vary_brightness(scene.background, draws[5]))
    return Image.composite(front, back, outline)


def _outline_mask(scene: Scene, draws: list[float], image_size: int) -> Image.Image:
    """Draw the object at each of its positions, at a multiple of the size, and reduce that to a soft mask."""
    side = image_size * _OVERSAMPLING
    radius = RADII[scene.size] * (0.9 + 0.2 * draws[2]) * side
    mask = Image.new("L", (side, side))
    for position in PLACES.get(scene.position, (scene.position,)):
        column, line = POSITIONS[position]
        x = (GRID[column] + 0.04 * (draws[0] - 0.5)) * side
        y = (GRID[line] + 0.04 * (draws[1] - 0.5)) * side
        mask = ImageChops.lighter(mask, outline_mask(scene.shape, side, (x, y), radius, 16 * (draws[3] - 0.5)))
    return mask.reduce(_OVERSAMPLING)


def _vary_brightness(colour: str, draw: float) -> tuple[int, int, int]:
    shift = round(20 * (draw - 0.5))
    red, green, blue = (min(255, max(0, channel + shift)) for channel in COLOURS[colour])
    return red, green, blue


def outline_mask(shape: str, side: int, centre: tuple[float, float], radius: float, degrees: float) -> Image.Image:
    """Mask of `side` pixels, 255 inside a shape of `SHAPES`; centre (x, y) in pixels, rotation clockwise."""
    mask = Image.new("L", (side, side))
    canvas, (x, y), turn = ImageDraw.Draw(mask), centre, math.radians(degrees)
    if shape in ("circle", "ring"):
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
        if shape == "ring":
            hole = 0.55 * radius
            canvas.ellipse((x - hole, y - hole, x + hole, y + hole), fill=0)
        return mask
    points = [(radius * r, math.radians(corner) + turn) for r, corner in _POLYGONS[shape]]
    canvas.polygon([(x + r * math.sin(angle), y - r * math.cos(angle)) for r, angle in points], fill=255)
    return mask


_ARM = math.degrees(math.atan2(0.3, 1.0))
_QUARTER = [(math.hypot(1.0, 0.3), -_ARM), (math.hypot(1.0, 0.3), _ARM), (math.hypot(0.3, 0.3), 45.0)]  # of a cross

# Corners as (radius, degrees clockwise from the top).
_POLYGONS: dict[str, list[tuple[float, float]]] = {
    "square": [(1.15, 45 + 90 * i) for i in range(4)],
    "diamond": [(1.2 if i % 2 == 0 else 0.75, 90 * i) for i in range(4)],
    "triangle": [(1.15, 120 * i) for i in range(3)],
    "star": [(1.2 if i % 2 == 0 else 0.5, 36 * i) for i in range(10)],
    "cross": [(r, degrees + 90 * turn) for turn in range(4) for r, degrees in _QUARTER],
}


def write_tars(source: Shapes, out: Path, samples_per_shard: int, *, overwrite: bool = False) -> list[Path]:
    """Write the tars `shapes-000000.tar`, ... into a folder without others of the kind; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    count = -(-source.samples // samples_per_shard)
    there = {path.name for path in out.glob("shapes-*.tar")}
    if there and not overwrite:
        raise ConfigError(f"out={out} holds shapes-*.tar: choose another folder, or replace them by overwrite=true")
    if left := sorted(there - {f"shapes-{number:06d}.tar" for number in range(count)}):
        raise ConfigError(f"out={out}: {left[0]} would stay beside {count} new tars; remove it")

    def encoded(row: int) -> dict[str, Any]:
        scene, caption, picture = source.draw(row)
        file = io.BytesIO()
        picture.save(file, format="png")
        return {"__key__": f"{row:07d}", "png": file.getvalue(), "txt": caption, "json": asdict(scene)}

    firsts = range(0, source.samples, samples_per_shard)
    return [
        write_tar(
            out / f"shapes-{i:06d}.tar", map(encoded, range(first, min(first + samples_per_shard, source.samples)))
        )
        for i, first in enumerate(firsts)
    ]
