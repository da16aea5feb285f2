"""Pictures and maps of a user's become a guide: upright, square, and of one kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cascade_train.commands.generate import GenerateArgs
from cascade_train.errors import ConfigError
from cascade_train.results.sampling import GuideFiles


def picture(folder: Path, name: str, mode: str = "RGB", size: tuple[int, int] = (40, 20)) -> str:
    """Write a picture whose left half is dark and whose right half is bright."""
    image = Image.new("RGB", size, (10, 20, 30))
    image.paste((250, 240, 230), (size[0] // 2, 0, *size))
    image.convert(mode).save(folder / name)
    return str(folder / name)


def files(*paths: str, is_map: bool = False, side: int = 16) -> GuideFiles:
    key = "control" if is_map else "image"
    return GuideFiles(key=key, paths=paths, strength=0.5, size=(side, side), side=side)


def test_pictures_are_given_to_their_prompts(tmp_path: Path) -> None:
    pair = files(picture(tmp_path, "wide.png"), picture(tmp_path, "tall.png", size=(20, 40)))
    made = pair.guide([0, 1, 0], [0, 0, 1])
    assert made.image_BCHW.shape == (3, 3, 16, 16)
    assert (made.image_BCHW.dtype, made.strength, made.numbers) == (torch.uint8, 0.5, (0, 0, 1))
    assert torch.equal(made.image_BCHW[0], made.image_BCHW[2])
    assert made.image_BCHW[0, :, 8, 0].tolist() == [10, 20, 30]
    assert made.image_BCHW[0, :, 8, -1].tolist() == [250, 240, 230]
    one = files(pair.paths[0]).guide([0, 1], [0, 0])
    assert torch.equal(one.image_BCHW[0], one.image_BCHW[1])


def test_a_picture_lying_on_its_side_is_turned(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(picture(tmp_path, "a.png")).save(tmp_path / "b.jpg", exif=exif, quality=100)
    turned = files(str(tmp_path / "b.jpg"), side=20).guide([0], [0]).image_BCHW[0]
    assert turned[0, 0, 10] < 40
    assert turned[0, -1, 10] > 220


@pytest.mark.parametrize(
    ("mode", "name", "channels"), [("L", "a.png", 1), ("1", "a.png", 1), ("RGB", "a.png", 3), ("RGBA", "a.png", 4),
                                   ("P", "a.png", 3), ("LA", "a.png", 1)]
)  # fmt: skip
def test_a_map_keeps_its_channels(mode: str, name: str, channels: int, tmp_path: Path) -> None:
    path = picture(tmp_path, name, mode, size=(1, 1))
    assert files(path, is_map=True).guide([0], [0]).image_BCHW.shape == (1, channels, 16, 16)
    assert files(path).guide([0], [0]).image_BCHW.shape == (1, 3, 16, 16)


def test_sixteen_bits_are_scaled_and_transparency_is_white_as_in_training(tmp_path: Path) -> None:
    Image.fromarray(np.full((16, 16), 32896, dtype=np.uint16)).save(tmp_path / "deep.png")
    Image.new("RGBA", (16, 16), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    for is_map in (False, True):
        deep = files(str(tmp_path / "deep.png"), is_map=is_map).guide([0], [0]).image_BCHW
        assert deep.unique().tolist() == [128]
    assert files(str(tmp_path / "clear.png")).guide([0], [0]).image_BCHW.unique().tolist() == [255]


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no picture")
    for path in ("a.txt", "none.png"):
        with pytest.raises(ConfigError, match=r"image=.*: no picture that can be read"):
            files(str(tmp_path / path)).guide([0], [0])
    mixed = files(picture(tmp_path, "a.png", "L"), picture(tmp_path, "b.png"), is_map=True)
    with pytest.raises(ConfigError, match="maps of one kind are needed"):
        mixed.guide([0, 1], [0, 0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": "a.png", "control": "b.png"}, "image and control both say what the images follow"),
        ({"image": "a.png", "strength": -1.0}, "strength=-1.0 must be 0 or more, and is for image"),
        ({"strength": 0.5}, "strength=0.5 must be 0 or more, and is for image"),
        ({"image": ["a.png", "b.png"]}, "2 images for 3 prompts; give one, or one for each"),
        ({"start_strength": 0.5}, "start_strength=0.5 must be above 0, at most 1, and is for start_image"),
        ({"start_image": "a.png", "start_strength": 0.0}, "start_strength=0.0 must be above 0"),
        ({"start_image": "none.png"}, "start_image=none.png: there is no such file"),
        ({"decoder_steps": 3}, "decoder_steps=3 is for decoder"),
        ({"decoder": "b", "decoder_steps": 0}, "decoder_steps=0 must be 1 or more"),
        ({"decoder": "b", "decoder_guidance_scale": -1.0}, "decoder_guidance_scale=-1.0 must be 0 or more"),
        ({"compression": 0.5}, "compression=0.5 must be 1 or more"),
        ({"height": 0}, "height=0 must be 1 or more"),
        ({"variation": ["a.png", "b.png"]}, "2 images for 3 prompts; give one, or one for each"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenerateArgs(source="run", prompts=["a", "b", "c"], **given)
