"""`cascade-train evaluate`: numbers equal to their libraries' on the same pictures, reconstructions, watched runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch_fidelity import FeatureExtractorBase, calculate_metrics, register_feature_extractor

from cascade_train.commands.evaluate import EvaluateArgs, evaluate
from cascade_train.config.saved import load_yaml
from cascade_train.engine.checkpoint.folder import CheckpointFolder, Manifest, hash_file, write_manifest
from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights_source import local_path
from cascade_train.models.image_quality import ClipScore
from cascade_train.results import export
from cascade_train.results.evaluation.measures import load_tiny_features
from cascade_train.results.evaluation.watch import next_checkpoint
from tests.distributed.test_modes import NARROW
from tests.integration.runs import train
from tests.integration.test_stage_a import NARROW as A_NARROW
from tests.unit.models.test_image_quality import library_score, tiny_clip

pytestmark = pytest.mark.slow

PROMPTS = ["a red circle", "a blue star", "a green square", "a small red circle", "a big yellow triangle"]
FAST = {"steps": 1, "sampler": "ddim", "batch_size": 4}


def draw(folder: Path, side: int = 96, count: int = 5) -> Path:
    """Write square pictures of blocks of colour, captioned by their names."""
    folder.mkdir()
    for number in range(count):
        blocks = np.random.default_rng(number).integers(0, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(blocks).resize((side, side), Image.Resampling.NEAREST).save(folder / f"blocks {number}.png")
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("real") / "pictures")


def evaluated(out: Path, **given: Any) -> dict[str, float]:
    """Evaluate and return the numbers that were written."""
    assert evaluate(EvaluateArgs(out=str(out), **{**FAST, **given})) == 0
    assert (out / "grid.png").is_file()
    return json.loads((out / "metrics.json").read_text())["measures"]


def pixels(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)


@pytest.fixture(scope="module")
def cascade(real: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Numbers of the tiny cascade by the packaged compressor and an untrained CLIP, and where the files lie."""
    folder = tmp_path_factory.mktemp("cascade")
    (folder / "prompts.csv").write_text("caption\n" + "\n".join(PROMPTS))
    clip = tiny_clip(folder / "clip")
    measures = evaluated(
        folder / "out",
        source="package:tiny",
        decoder="package:tiny",
        decoder_steps=1,
        prompts=f"@{folder / 'prompts.csv'}",
        real=str(real),
        features="package:tiny",
        clip=clip,
    )
    return {"folder": folder, "measures": measures, "clip": clip}


class Compressor(FeatureExtractorBase):
    """The packaged compressor's features for torch-fidelity; those of Inception have a test of their own."""

    def __init__(self, name: str, features_list: list[str], **_: Any) -> None:
        super().__init__(name, features_list)
        self.features = load_tiny_features(torch.device("cpu"))

    def forward(self, pixels_BCHW: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.features(pixels_BCHW.float() / 255),)

    @staticmethod
    def get_provided_features_list() -> tuple[str]:
        return ("64",)

    @staticmethod
    def get_default_feature_layer_for_metric(metric: str) -> str:
        return "64"

    @staticmethod
    def can_be_compiled() -> bool:
        return False


def test_distances_of_sets_are_those_of_torch_fidelity(cascade: dict[str, Any], real: Path) -> None:
    folder, measures = cascade["folder"], cascade["measures"]
    register_feature_extractor("compressor", Compressor)
    theirs = calculate_metrics(
        input1=str(folder / "out" / "pictures"),
        input2=str(real),
        feature_extractor="compressor",
        **{"fid": True, "kid": True, "prc": True, "kid_subset_size": len(PROMPTS), "samples_shuffle": False},
        **{"cuda": False, "verbose": False, "cache": False, "save_cpu_ram": True},
    )
    names = {"fid": "frechet_inception_distance", "kid": "kernel_inception_distance_mean"}
    names |= {"kid_std": "kernel_inception_distance_std", "precision": "precision", "recall": "recall"}
    assert measures["fid"] > 0.1
    for name, other in names.items():
        assert measures[name] == pytest.approx(theirs[other], rel=1e-3, abs=1e-6), name


def test_the_clip_score_is_that_of_torchmetrics(cascade: dict[str, Any]) -> None:
    score = ClipScore(cascade["clip"], device=torch.device("cpu"), key="clip")
    images = [pixels(path) for path in sorted((cascade["folder"] / "out" / "pictures").glob("*.png"))]
    assert len(images) == len(PROMPTS)
    wanted = library_score(score, images, PROMPTS)
    assert cascade["measures"]["clip_score"] == pytest.approx(wanted, abs=1e-3)


def test_pictures_of_other_settings_are_not_mistaken(cascade: dict[str, Any], real: Path) -> None:
    given = {"source": "package:tiny", "decoder": "package:tiny", "decoder_steps": 1, "prompts": PROMPTS}
    with pytest.raises(ConfigError, match="out=.*out: holds pictures of another evaluation, which differs in seed"):
        evaluated(cascade["folder"] / "out", **given, clip=cascade["clip"], seed=1)
    with pytest.raises(ConfigError, match="holds pictures of another evaluation, which differs in sample of from"):
        evaluated(cascade["folder"] / "out", **given, clip=cascade["clip"], negative_prompt="a blue star")
    numbers = evaluated(cascade["folder"] / "out", **given, clip=cascade["clip"])
    assert numbers == {"clip_score": cascade["measures"]["clip_score"]}, "no other network, no other number"


def test_stage_b_reconstructs_and_every_pair_is_measured(
    real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure
    from torchvision.models.vgg import cfgs, make_layers

    torch.manual_seed(0)
    vgg = {f"features.{name}": value for name, value in make_layers(cfgs["D"]).state_dict().items()}
    save_file(vgg, tmp_path / "vgg.safetensors")
    measures = evaluated(
        tmp_path / "out",
        source="package:tiny/decoder",
        real=str(real),
        samples=4,
        features="package:tiny",
        lpips=str(tmp_path / "vgg.safetensors"),
    )
    assert measures.keys() == {"rfid", "psnr", "ssim", "lpips"}
    made = [pixels(path) for path in sorted((tmp_path / "out" / "pictures").glob("*.png"))]
    originals = [pixels(path) for path in sorted(real.glob("*.png"))]
    assert len(made) == 4
    pairs = [min(originals, key=lambda each: (each.float() - image.float()).square().mean()) for image in made]
    assert len({pair.numpy().tobytes() for pair in pairs}) == 4, "each picture is nearest to an original of its own"
    images, wanted = (torch.stack(each).float() / 255 for each in (made, pairs))
    psnr = peak_signal_noise_ratio(images, wanted, data_range=1.0, reduction="elementwise_mean", dim=(1, 2, 3))
    assert measures["psnr"] == pytest.approx(float(psnr), abs=1e-3)
    ssim = structural_similarity_index_measure(images, wanted, data_range=1.0)
    assert measures["ssim"] == pytest.approx(float(ssim), abs=1e-4)

    monkeypatch.chdir(tmp_path)
    others = draw(tmp_path / "pictures", side=95)  # of the same names and captions
    given = {"source": "package:tiny/decoder", "samples": 4}
    with pytest.raises(ConfigError, match="out=.*out: holds pictures of another evaluation, which differs in real"):
        evaluated(tmp_path / "out", **given, real=str(others))
    with pytest.raises(ConfigError, match="another evaluation, which differs in codec of from"):
        evaluated(
            tmp_path / "out", **given, real=str(real), codec=shutil.copytree(local_path("package:tiny/vqgan"), "codec")
        )


def test_stage_a_reconstructs(real: Path, tmp_path: Path) -> None:
    one_step = ("train.max_steps=1", "train.global_batch_size=2", "checkpoint.every_steps=null")
    run = train(
        tmp_path / "a", "task=reconstruction", "model=a_tiny", *(f"model.{each}" for each in A_NARROW), *one_step
    )
    measures = evaluated(tmp_path / "out", source=str(run), real=str(real))
    assert measures.keys() == {"psnr", "ssim"}
    assert 3 < measures["psnr"] < 30
    assert json.loads((run / "evaluation.jsonl").read_text())["evaluate/psnr"] == measures["psnr"]


def test_a_watched_run_is_judged_at_each_checkpoint(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "prompts.txt").write_text("a red circle\na blue star\n")
    held_out = ("validate.share=0.3", "data.samples=40", f"sample.prompts=@{tmp_path}/prompts.txt")
    short = ("task=finetune", *NARROW, "train.max_steps=4", "train.global_batch_size=2", "ema.decay=0.5")
    run = train(tmp_path / "run", *short, *held_out, "tracker=tensorboard")
    assert load_yaml(run / "config.yaml").sample.prompts == ["a red circle", "a blue star"]
    given = {"watch": str(run), "features": "package:tiny", "samples": 4, **FAST}
    assert evaluate(EvaluateArgs(**given)) == 0
    lines = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert lines[0]["evaluate/fid"] != lines[1]["evaluate/fid"]
    assert lines[0]["real"] == "the run's held-out pictures"
    assert not (run / "evaluation" / "step_4" / "weights").exists()
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    shown = {event.step: event.value for event in events.Scalars("evaluate/fid")}
    assert shown == pytest.approx({line["step"]: line["evaluate/fid"] for line in lines}, rel=1e-5)
    assert len(events.Scalars("loss")) == 4, "the same run has its losses"
    assert evaluate(EvaluateArgs(**given)) == 0
    assert "0 checkpoints of" in capsys.readouterr().out.splitlines()[-1], "all are judged"

    pictures = run / "evaluation" / "step_4" / "pictures"
    exported = evaluated(tmp_path / "export", source=str(run), **{k: given[k] for k in ("features", "samples")})
    caution = json.loads((tmp_path / "export" / "metrics.json").read_text())["caution"]
    assert caution.startswith("fid of 4 images against 11 real ones is too large")
    assert {caution, lines[0]["caution"]} == {caution}
    assert caution in capsys.readouterr().out, "below the table"
    assert exported["fid"] == pytest.approx(lines[1]["evaluate/fid"]), "the last checkpoint is what was exported"
    for path in sorted(pictures.glob("*.png")):
        assert torch.equal(pixels(path), pixels(tmp_path / "export" / "pictures" / path.name))
    monkeypatch.chdir(tmp_path)
    made = {path: path.stat().st_mtime_ns for path in pictures.glob("*.png")}
    assert evaluate(EvaluateArgs(source="run", **{k: given[k] for k in ("features", "samples", *FAST)})) == 0
    assert {path: path.stat().st_mtime_ns for path in pictures.glob("*.png")} == made, "of the same weights: kept"
    with pytest.raises(ConfigError, match="from=run: no checkpoint of step 3; steps that are there: 2, 4"):
        evaluate(EvaluateArgs(source="run", checkpoint=3, features="package:tiny", samples=4))
    assert not (run / "evaluation" / "step_3").exists()
    a_step_that_is_saved_anew_is_judged_anew(run, given, caplog)
    a_checkpoint_may_go_while_it_is_evaluated(run, given, monkeypatch)


def a_step_that_is_saved_anew_is_judged_anew(
    run: Path, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Watch a run whose step 2 was half judged, and numbered, of weights that a resume has replaced since."""
    settings, lines = run / "evaluation" / "step_2" / "settings.json", run / "evaluation.jsonl"
    made = json.loads(settings.read_text())
    settings.write_text(json.dumps(made | {"from": "earlier"}))
    picture = settings.parent / "pictures" / "000000.png"
    Image.new("RGB", (64, 64)).save(picture)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    earlier = [row | {"weights": "earlier"} if row["step"] == 2 else row for row in rows]
    lines.write_text("".join(json.dumps(row) + "\n" for row in earlier))
    assert evaluate(EvaluateArgs(**given)) == 0
    assert "step_2: the run has saved this step again since; its pictures are sampled anew" in caplog.text
    assert json.loads(settings.read_text()) == made
    assert pixels(picture).float().std() > 0, "made anew"
    last = json.loads(lines.read_text().splitlines()[-1])
    assert last == rows[0], "the same weights, judged again"


def a_checkpoint_may_go_while_it_is_evaluated(
    run: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watch in another way, while retention deletes the first checkpoint as its files are being read."""
    load = export.restore_training_state

    def deleting(store: Any, path: Path, *rest: Any, **options: Any) -> Any:
        if path.name == "step_2":
            shutil.rmtree(path)
        return load(store, path, *rest, **options)

    monkeypatch.setattr(export, "restore_training_state", deleting)
    before = len((run / "evaluation.jsonl").read_text().splitlines())
    assert evaluate(EvaluateArgs(**{**given, "seed": 3}, out="seeds")) == 0
    lines = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[before:]] == [4]


def test_a_watch_of_a_finished_run_that_is_continued_goes_on(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    stamps: dict[int, str] = {}

    def save(step: int, *, finished: bool, weights: str = "first") -> None:
        folder.path(step).mkdir(parents=True, exist_ok=True)
        (folder.path(step) / "weights").write_text(weights)
        files = {"weights": hash_file(folder.path(step) / "weights")}
        manifest = Manifest(step=step, files=files, facts={"finished": finished})
        stamps.setdefault(step, manifest.stamp)
        write_manifest(folder.path(step), manifest)

    def looked(done: set[int]) -> tuple[int | None, bool]:
        found, has_ended = next_checkpoint(folder.directory, {(step, stamps[step]) for step in done})
        return None if found is None else found.step, has_ended

    save(4, finished=True)
    assert looked({4}) == (None, True)
    (tmp_path / ".lock").touch()
    assert looked({4}) == (None, False), "the run has begun again"
    (tmp_path / ".lock").unlink()
    save(5, finished=False)
    assert looked({4}) == (5, False)
    assert looked({4, 5}) == (None, False), "killed, and not at its new end"
    save(6, finished=True)
    assert looked({4, 5, 6}) == (None, True)
    save(5, finished=False, weights="later")
    assert looked({4, 5, 6}) == (5, False), "saved again after a resume"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "evaluate needs from=<a run, export or weights>, or watch=<a run>, and not both"),
        ({"watch": "b", "checkpoint": 3}, "checkpoint=3: is for from=; watch= evaluates all. Leave it out"),
        ({"watch": "{real}"}, "pictures: is no run. Name the folder of a run"),
        (
            {"source": "package:tiny", "prompts": "a", "features": "package:tiny", "real": "{real}"},
            "features=package:tiny: sets of 1 images and 5 real pictures are too small to compare; at least 4",
        ),
        ({"source": "package:tiny", "clip": "c", "lpips": "v"}, "lpips=v: compares reconstructions with originals"),
        ({"source": "package:tiny", "features": "package:tiny", "real": "nowhere"}, "real=nowhere: data"),
        (
            {"source": "package:tiny/decoder", "prompts": "a", "real": "{real}"},
            "prompts: is for a Stage C that samples from captions alone, and from=package:tiny/decoder makes one",
        ),
        (
            {"source": "package:tiny/decoder", "height": 64, "real": "{real}"},
            "height=64: from=package:tiny/decoder follows real pictures and their sizes",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(
    given: dict[str, Any], message: str, real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    filled = {key: value.format(real=real) if isinstance(value, str) else value for key, value in given.items()}
    with pytest.raises(ConfigError, match=message):
        evaluate(EvaluateArgs(**filled))
    assert not list(tmp_path.iterdir()), "nothing is left behind"
