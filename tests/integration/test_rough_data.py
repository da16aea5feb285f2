"""Data as the world gives it: what can be used trains, the rest is counted or refused, nothing does harm."""

import io
import json
import logging
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from cascade_train.__main__ import launch
from tests.integration.runs import NARROW, SMALL, read_metrics, train
from tests.unit.data import tars

pytestmark = pytest.mark.slow

NORMAL = 44


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def bomb():
    """A PNG of a few bytes whose header says 30000 x 30000."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def odd_pictures():
    """Return (name, file) of pictures that are unusual but can be used."""
    plain = Image.new("RGB", (120, 90), (200, 30, 60))
    turned = Image.Exif()
    turned[0x0112] = 6
    return [
        ("cmyk.jpg", encoded(plain.convert("CMYK"), "jpeg")),
        ("exif.jpg", encoded(plain, "jpeg", exif=turned)),
        ("gray.jpg", encoded(plain.convert("L"), "jpeg")),
        ("huge.jpg", encoded(Image.new("L", (10000, 10000), 90), "jpeg")),
        ("long.png", encoded(Image.new("RGB", (3000, 2)), "png")),
        ("palette.png", encoded(plain.quantize(4), "png", transparency=0)),
        ("really_png.jpg", encoded(plain, "png")),
        ("really_webp.png", encoded(plain, "webp")),
        ("sixteen.png", encoded(Image.fromarray(np.full((90, 120), 30000, dtype=np.uint16)), "png")),
        ("tiny.png", encoded(Image.new("RGB", (1, 1)), "png")),
        ("transparent.webp", encoded(Image.new("RGBA", (99, 77), (0, 0, 0, 9)), "webp")),
        ("../../escaped.png", encoded(plain, "png")),
        ("/escaped_too.png", encoded(plain, "png")),
        ("größe_图.png", encoded(plain, "png")),
        ("猫🐈.jpg", encoded(plain, "jpeg")),
    ]


def unusable_pictures():
    whole = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)), "jpeg")
    return [
        ("x_bomb.png", bomb()),
        ("x_cut.jpg", whole[: len(whole) // 2]),
        ("x_html.jpg", b"<html>404 Not Found</html>"),
        ("x_script.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"),
    ]


@pytest.fixture
def rough(tmp_path):
    def captioned(pictures):
        return [
            file
            for name, content in pictures
            for file in ((name, content), (f"{name.rpartition('.')[0]}.txt", "eine größe 图".encode()))
        ]

    normal, files = tars.samples(range(NORMAL)), captioned(odd_pictures())
    for place, bad in enumerate(unusable_pictures()):  # far from each other: one that stands in is a good one
        files += normal[place * 22 : (place + 1) * 22] + captioned([bad])
    return tars.write(tmp_path / "set" / "rough.tar", files)


@pytest.fixture(autouse=True)
def _folder(tmp_path):
    (tmp_path / "set").mkdir()


def test_a_rough_set_trains_and_counts_what_it_could_not_use(rough, tmp_path, caplog):
    total = NORMAL + len(odd_pictures()) + len(unusable_pictures())
    steps = -(-total // 8) + 2
    caplog.set_level(logging.WARNING)
    run = train(
        tmp_path / "run",
        *NARROW,
        "task=finetune",
        "data=webdataset",
        f"data.urls={rough}",
        "data.aspect_ratios=original",
        "data.max_unreadable_share=0.1",
        "data.num_workers=2",
        f"train.max_steps={steps}",
        "checkpoint.every_steps=null",
    )
    assert len(read_metrics(run)) == steps
    said = [line for line in caplog.messages if line.startswith("unreadable sample, another stands in: ")]
    for name, reason in (
        ("x_bomb", "more pixels than data.max_pixels=134217728"),
        ("x_cut", "OSError: image file is truncated"),
        ("x_html", "it is a web page"),
        ("x_script", "not a picture of a known format"),
    ):
        assert sum(f"rough.tar:{name} ({reason}" in line for line in said) == 1, (name, said)
    assert len(said) == 4
    assert not [path for path in tmp_path.parent.rglob("*escaped*") if path.suffix == ".png"]


def test_masked_mirrored_and_salient_pictures_train_and_waiting_is_measured(tmp_path):
    mask = Image.new("L", (40, 32), 0)
    files = tars.samples(range(16))
    files += [(f"{key:04d}.mask.png", encoded(mask, "png")) for key in range(16)]
    tar = tars.write(tmp_path / "set" / "masked.tar", sorted(files))
    run = train(
        tmp_path / "run",
        *NARROW,
        "task=finetune",
        "data=webdataset",
        f"data.urls={tar}",
        "data.crop=saliency",
        "data.flip_prob=0.5",
        "data.num_workers=1",
        "train.max_steps=2",
        "checkpoint.every_steps=null",
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [0.0, 0.0]  # every mask is black: nothing counts
    assert all(0.0 <= row["data_wait_share"] <= 1.0 for row in rows)


def test_too_many_unusable_pictures_are_listed(rough, tmp_path, caplog, capfd):
    bad = [(f"bad{number}.{extension}", b"<html>") for number in range(2) for extension in ("jpg", "txt")]
    more = tars.write(tmp_path / "set" / "more.tar", [*tars.samples(range(2)), *bad])
    code = launch(
        [
            *SMALL,
            "task=finetune",
            f"run.dir={tmp_path / 'run'}",
            "data=webdataset",
            f"data.urls=[{rough},{more}]",
            "data.num_workers=0",
        ]
    )
    assert code == 1
    said = " ".join(capfd.readouterr().err.split())
    assert "4 of 67 samples are unreadable, more than data.max_unreadable_share=0.01 allows" in said
    assert "more.tar:bad0, more.tar:bad1, rough.tar:x_html, rough.tar:x_script" in said
    assert "allow as many by data.max_unreadable_share=0.06" in said
    assert not (tmp_path / "run").exists()


def test_a_batch_of_more_than_all_samples_is_refused(tmp_path, capfd):
    path = tars.write(tmp_path / "set" / "few.tar", tars.samples(range(10)))
    few = [*NARROW, "task=finetune", "data=webdataset", f"data.urls={path}", "data.num_workers=0"]
    arguments = [*SMALL, *few, f"run.dir={tmp_path / 'run'}"]
    assert launch([*arguments, "train.global_batch_size=16"]) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "train.global_batch_size=16 is more than the 10 samples to train on" in said
    assert not (tmp_path / "run").exists()
