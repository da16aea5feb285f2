"""The folder of an evaluation is continued, emptied or refused, by what its pictures depend on."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from cascade_train.distributed.process_group import World
from cascade_train.errors import ConfigError
from cascade_train.results.evaluation.evaluate import Purpose, Settings, check_fits, claim, measurable
from cascade_train.results.evaluation.measures import Pictures, load_networks
from cascade_train.results.evaluation.pictures import Folder
from cascade_train.results.evaluation.published import INCEPTION
from cascade_train.results.find import TrainedModel
from tests.unit.config.composing import checked

EMPTY: dict[str, Any] = dict.fromkeys(each.name for each in fields(Settings))
SETTINGS = Settings(**EMPTY | {"prompts": ("a red square",), "count": 1, "seed": 0, "batch_size": 1, "resize": "clean"})


def claimed(out: Path, weights: str, *, seed: int = 0, run: Path | None = None) -> bool:
    """Claim a folder; return whether the picture that lay in it is still there."""
    out.mkdir(parents=True, exist_ok=True)
    claim(out, {"from": weights, "seed": seed}, run=run)
    was_there = Folder(out).picture(0).is_file()
    (out / "pictures").mkdir(exist_ok=True)
    Folder(out).picture(0).touch()
    return was_there


def test_pictures_stay_unless_the_run_has_replaced_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    assert not claimed(out, "a", run=tmp_path)
    assert claimed(out, "a", run=tmp_path)
    assert claimed(out, "a"), "another way to name the same weights"
    assert not caplog.messages
    assert not claimed(out, "b", run=tmp_path)
    assert "the run has saved this step again since; its pictures are sampled anew" in caplog.text
    assert claimed(out, "b", run=tmp_path)


def test_pictures_of_another_run_or_of_no_run_are_never_removed(tmp_path: Path) -> None:
    claimed(tmp_path / "out", "a", run=tmp_path / "one")
    for run in (tmp_path / "other", None):
        with pytest.raises(ConfigError, match="holds pictures of another evaluation, which differs in from"):
            claimed(tmp_path / "out", "b", run=run)
    with pytest.raises(ConfigError, match="which differs in count or captions"):
        claim(tmp_path / "out", {"from": "a", "seed": 0, "captions": [2, "ab"]})
    with pytest.raises(ConfigError, match="which differs in from, seed"):
        claimed(tmp_path / "out", "b", seed=1, run=tmp_path / "one")
    claimed(tmp_path / "plain", "a")
    with pytest.raises(ConfigError, match="which differs in from"):
        claimed(tmp_path / "plain", "b")
    assert claimed(tmp_path / "out", "a", run=tmp_path / "one")


def test_what_is_not_chosen_is_measured_by_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    nothing = replace(SETTINGS, features=None, clip=None)

    def features(*overrides: str, settings: Settings = nothing) -> str | None:
        model = TrainedModel(origin="from=run", cfg=checked(*overrides), export=None)
        return measurable(settings, model).features

    tiny, large = ("model=c_tiny", "task=finetune"), ("model=c_1b", "task=finetune")
    assert features(*tiny) == "package:tiny"
    assert features(*tiny, settings=replace(nothing, clip="c")) is None
    assert features(*tiny, settings=replace(nothing, features="f")) == "f"
    assert features("model=b_tiny", "task=reconstruction") is None, "PSNR and SSIM are measured"
    assert features(*large) is None
    model = TrainedModel(origin="from=run", cfg=checked(*large), export=None)
    with pytest.raises(
        ConfigError, match="Inception V3 is not on this machine. Download it with cascade-train download"
    ):
        check_fits(nothing, model, None, Purpose.of(model))
    INCEPTION.path.parent.mkdir(parents=True)
    INCEPTION.path.touch()
    assert features(*large) == str(INCEPTION.path)


def test_pictures_of_an_evaluation_that_are_no_longer_whole_are_named(tmp_path: Path, world: World) -> None:
    folder = Folder(tmp_path)
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (4, 4)).save(folder.picture(0))
    Image.new("RGB", (8, 4)).save(folder.picture(1))
    with pytest.raises(ConfigError, match="pictures 0 to 1 of the evaluation differ in size; remove its out= folder"):
        Pictures(batches=[(0, 1)], read=folder.read_all, world=world).features(lambda image: image)
    for damaged in (b"", folder.picture(0).read_bytes()[:40]):
        folder.picture(0).write_bytes(damaged)
        with pytest.raises(ConfigError, match="000000.png is no whole picture .*; remove it, and it is made again"):
            folder.read(0)


def test_only_features_need_torch_fidelity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cascade_train.results.evaluation.measures.find_spec", lambda name: None)
    monkeypatch.setattr("cascade_train.results.evaluation.measures.check_installed", lambda: None)
    rest: dict[str, Any] = {"resize": "clean", "clip": None, "lpips": None, "device": torch.device("cpu")}
    assert load_networks(features=None, **rest).features is None
    with pytest.raises(ConfigError, match="features=inception: FID.* torch-fidelity, which is not installed"):
        load_networks(features="inception", **rest)


@pytest.mark.parametrize(("resize", "antialias"), [("clean", True), ("tf1", False)])
def test_clean_resizing_is_antialiased(monkeypatch: pytest.MonkeyPatch, resize: str, antialias: bool) -> None:
    def load(file: str, **given: Any) -> Any:
        return file, given

    monkeypatch.setattr("cascade_train.results.evaluation.measures.load_inception", load)
    given: Any = load_networks(features="f.pth", resize=resize, clip=None, lpips=None, device=torch.device("cpu"))
    assert given.features == ("f.pth", {"device": torch.device("cpu"), "key": "features", "antialias": antialias})
