from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from cascade_train.data.decoding import jpeg
from cascade_train.data.decoding.decode import decode
from cascade_train.data.sample import UnreadableSampleError
from tests.unit.data.decoding.test_decode import WHOLE, encode
from tests.unit.data.decoding.test_framing import photo


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    jpeg.fast_jpeg_decoder.cache_clear()
    yield
    jpeg.fast_jpeg_decoder.cache_clear()


def pixels_of(encoded: bytes) -> np.ndarray:
    return decode(encoded, WHOLE, max_pixels=None).pixels


@pytest.mark.parametrize("module", ["torchvision", "torchvision.io"])
def test_without_torchvision_pillow_decodes_and_one_warning_says_so(
    module: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encoded = encode(photo(64, 48), "jpeg")
    fast = pixels_of(encoded)
    jpeg.fast_jpeg_decoder.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with caplog.at_level(logging.WARNING):
        slow = [pixels_of(encoded) for _ in range(3)]
    assert jpeg.fast_jpeg_decoder() is None
    assert caplog.text.count("torchvision cannot decode JPEG here (") == 1
    assert np.abs(slow[0].astype(int) - fast).max() <= 2


def test_a_build_without_its_extension_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.io

    def missing(*_: object, **__: object) -> None:
        raise RuntimeError("Couldn't load custom C++ ops")

    monkeypatch.setattr(torchvision.io, "decode_jpeg", missing)
    assert jpeg.fast_jpeg_decoder() is None


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("subsampling", [0, 2])
def test_both_decoders_give_the_same(mode: str, subsampling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode(photo(65, 47).convert(mode), "jpeg", quality=88, subsampling=subsampling, progressive=True)
    fast = pixels_of(encoded)
    monkeypatch.setattr("cascade_train.data.decoding.decode.fast_jpeg_decoder", lambda: None)
    assert np.abs(pixels_of(encoded).astype(int) - fast).max() <= 2


def test_both_decoders_refuse_the_same_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that change, vanish, or end: a file that one refuses the other refuses too, and pixels agree."""
    whole = encode(photo(64, 48), "jpeg", quality=90)
    draws = np.random.default_rng(0)
    damaged = []
    for _ in range(60):
        file = bytearray(whole)
        for place in draws.integers(2, len(file), 3):
            file[place] = draws.integers(256)
        damaged.append(bytes(file[: draws.integers(len(file) // 2, 2 * len(file))]))

    def outcomes() -> list[np.ndarray | None]:
        found: list[np.ndarray | None] = []
        for file in damaged:
            try:
                found.append(pixels_of(file).astype(int))
            except UnreadableSampleError:
                found.append(None)
        return found

    with_fast = outcomes()
    monkeypatch.setattr("cascade_train.data.decoding.decode.fast_jpeg_decoder", lambda: None)
    without = outcomes()
    assert [each is None for each in with_fast] == [each is None for each in without]
    assert 10 < sum(each is None for each in with_fast) < 55
    assert all(np.abs(one - other).max() <= 2 for one, other in zip(with_fast, without, strict=True) if one is not None)
