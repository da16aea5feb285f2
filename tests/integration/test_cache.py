"""Training from a cache: the same losses without the encoders, and an error wherever it would not be the same."""

import json
import re
import shutil
from pathlib import Path

import pytest

from cascade_train.__main__ import launch
from cascade_train.commands.generate import GenerateArgs, generate
from cascade_train.models.cascade.convolutional import ConvolutionalCompressor
from cascade_train.models.cascade.image_encoder import ImageEncoder
from cascade_train.models.cascade.latent_codec import VQGAN
from cascade_train.models.text_encoder import TextEncoder
from tests.distributed.test_modes import B_NARROW
from tests.integration.runs import NARROW, SMALL, once, read_metrics, train
from tests.unit.data.tars import picture, write
from tests.unit.models.cascade.test_stage_c import TINY_VISION

pytestmark = pytest.mark.slow

VISION = ",".join(f"{key}:{'null' if value is None else value}" for key, value in TINY_VISION.items())
MODEL = ("model=c_tiny", f"model.image_encoder={{{VISION}}}")
SHAPES = ("data=shapes", "data.samples=24", "data.image_size=96")
RUN = (
    *NARROW,
    f"model.image_encoder={{{VISION}}}",
    "task.image_keep_prob=0.5",
    "task.cond_drop_prob=0.3",
    "optimizer.lr=3e-3",
    "train.global_batch_size=4",
)
VALIDATED = ("validate.every_steps=2", "validate.share=0.3", "validate.samples=4", "validate.logsnr=[0]")


def make_cache(folder, *arguments):
    """Fill a cache in this process, assert that it ended well, and return its folder."""
    given = {argument.partition("=")[0] for argument in arguments}
    defaults = ("task=finetune", *MODEL, *(() if "data" in given else SHAPES), "unit_samples=10", "batch_size=7")
    kept = [argument for argument in defaults if argument.partition("=")[0] not in given]
    code = launch(["cache", *kept, f"out={folder}", *arguments])
    assert code == 0, f"exit code {code}"
    return folder


def refused(capfd, *arguments, command=("cache",), code=2):
    """Return what a refused command says."""
    assert launch([*command, *arguments]) == code
    return " ".join(capfd.readouterr().err.split())


def train_refused(capfd, folder, *arguments):

    command = once(*SMALL, "task=finetune", "data=cached", f"data.path={folder}", *arguments)
    return refused(capfd, *command, "run.dir=/nowhere/run", command=())


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    return make_cache(tmp_path_factory.mktemp("cache") / "cache", "sample.prompts=[a prompt]")


MIXTURE = (
    "data=mixture",
    *(f"+data@data.sources.{name}=shapes" for name in "ab"),
    *(f"data.sources.{name}.samples=10" for name in "ab"),
    "data.num_workers=0",
    "model.image_size=64",
    "task_count=2",
)


@pytest.fixture(scope="module")
def half_mixture(tmp_path_factory):
    return make_cache(tmp_path_factory.mktemp("mixture") / "cache", *MIXTURE, "task_index=0")


def assert_equal_metrics(left, right, tolerance=1e-5):
    rows = list(zip(read_metrics(left), read_metrics(right), strict=True))
    assert rows
    for row, other in rows:
        assert row == pytest.approx(other, rel=tolerance)
    return rows


@pytest.fixture(scope="module")
def from_cache(cached, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "run"
    arguments = ("task=finetune", *RUN, *VALIDATED, "sample.every_steps=4", "sample.steps=2", "sample.count=1")
    return train(directory, *arguments, "data=cached", f"data.path={cached}", "data.num_workers=2")


def test_training_from_a_cache_gives_the_losses_of_training_without(from_cache, tmp_path):
    without = train(tmp_path / "run", "task=finetune", *SHAPES, *RUN, *VALIDATED)
    rows = assert_equal_metrics(without, from_cache)
    assert len({row["loss"] for row, _ in rows}) == 4
    assert rows[1][0].keys() > {"validate/loss"}


def test_a_run_from_a_cache_paints_exports_and_generates_as_any_other(from_cache, tmp_path):
    assert (from_cache / "samples" / "step_4" / "00_sample.png").is_file()
    assert (from_cache / "export" / "prior" / "text_encoder").is_dir()
    assert (from_cache / "export" / "prior" / "image_encoder").is_dir()
    generate(GenerateArgs(source=str(from_cache), prompts=["not a caption of the data"], out=str(tmp_path), steps=2))
    assert (tmp_path / "00_00.png").is_file()


def test_a_lora_on_a_cache_builds_no_encoder_and_resumes_exactly(cached, from_cache, tmp_path, monkeypatch):
    lora = (
        "task=lora",
        *RUN,
        f"model.weights={from_cache}",
        "sample.every_steps=4",
        "sample.steps=2",
        "sample.prompts=[a prompt]",
    )
    without = train(tmp_path / "without", *lora, *SHAPES)
    for part in (TextEncoder, ImageEncoder, ConvolutionalCompressor):
        monkeypatch.setattr(part, "build", lambda *_, **__: pytest.fail("an encoder was built"))
    taken = (*lora, "data=cached", f"data.path={cached}", "data.num_workers=0")
    directory = train(tmp_path / "run", *taken, "train.max_steps=2")
    train(directory, *taken)
    assert_equal_metrics(without, directory)


def test_without_captions_these_may_be_drawn_anew_and_bf16_halves_the_latents(from_cache, tmp_path):
    drawn = ("data.captions.tags.separator=' '", "data.captions.tags.shuffle=true", "data.captions.tags.drop_prob=0.2")
    folder = make_cache(tmp_path / "cache", "captions=false", "dtype=bf16", *drawn)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["tensors"] == {"clip_img": "bfloat16 1x128", "effnet_latent": "bfloat16 16x3x3"}
    assert manifest["captions"] == {}
    lora = ("task=lora", *RUN, f"model.weights={from_cache}", "train.max_steps=2")
    runs = [
        train(tmp_path / name, *lora, *data, *drawn)
        for name, data in (("with", ("data=cached", f"data.path={folder}", "data.num_workers=0")), ("without", SHAPES))
    ]
    for row, other in assert_equal_metrics(*runs, tolerance=2e-2):
        assert row["loss"] != other["loss"]


def test_buckets_and_unreadable_pictures_are_as_without_a_cache(from_cache, tmp_path):
    def shape(key):
        return (128, 64) if key % 3 == 0 else (70, 120) if key % 3 == 1 else (96, 96)

    pictures = {key: picture(*shape(key), tint=7 * key) for key in range(18)}
    pictures[4] = pictures[4][: len(pictures[4]) // 2]
    files = [pair for k, p in pictures.items() for pair in ((f"{k:04d}.png", p), (f"{k:04d}.txt", b"picture %d" % k))]
    tar = write(tmp_path / "data.tar", files)
    ratios = "data.aspect_ratios=[1/1,1/2]"
    data = ("data=webdataset", f"data.urls={tar}", ratios, "data.num_workers=0", "data.max_unreadable_share=0.2")
    folder = make_cache(tmp_path / "cache", *data)
    lora = ("task=lora", *RUN, f"model.weights={from_cache}", "data.max_unreadable_share=0.2")
    small = (*lora, "train.max_steps=5")
    taken = train(tmp_path / "with", *small, "data=cached", f"data.path={folder}", "data.num_workers=0")
    assert_equal_metrics(train(tmp_path / "without", *data, *small), taken)
    assert len(json.loads((folder / "manifest.json").read_text())["identity"]["data.aspect_ratios"]) == 2


def test_processes_share_the_units_and_leave_what_one_alone_leaves(cached, tmp_path, capfd):
    half = make_cache(tmp_path / "cache", "task_index=1", "task_count=2", "sample.prompts=[a prompt]")
    assert "1 of 3 units lie in" in capfd.readouterr().out
    message = train_refused(capfd, half, *RUN)
    assert "unit 0 of 3 is missing or damaged" in message
    make_cache(half, "task_index=0", "task_count=2", "sample.prompts=[a prompt]")
    assert "is complete: 24 samples" in capfd.readouterr().out
    names = {path.name for path in cached.iterdir()}
    assert names == {path.name for path in half.iterdir()}
    tars = [name for name in names if name.endswith(".tar")]
    assert len(tars) == 6
    assert all((half / name).read_bytes() == (cached / name).read_bytes() for name in tars)


def test_what_is_damaged_is_made_again_and_nothing_else(tmp_path, capfd):
    folder = make_cache(tmp_path / "cache", "unit_samples=12")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    tar = folder / "samples-000001.tar"
    whole = tar.read_bytes()
    tar.write_bytes(whole.replace(b"effnet_latent", b"effnet_latenT", 1))
    message = train_run_error(capfd, folder, tmp_path / "run")
    assert re.search(r"samples-000001.tar is damaged at byte \d+: run cascade-train cache again", message)
    make_cache(folder, "unit_samples=12")
    assert tar.read_bytes() == whole
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    made = {name for name in after if after[name] != before[name]}
    assert made == {"samples-000001.tar", "captions-000001.tar", "unit-000001.npz"}


def train_run_error(capfd, folder, directory):

    data = ("data=cached", f"data.path={folder}", "data.num_workers=0")
    given = once(*SMALL, "task=finetune", *RUN, *data, f"run.dir={directory}")
    return refused(capfd, *given, command=(), code=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*RUN, "model.text_encoder.max_tokens=20"), "model.text_encoder.max_tokens=20, where the cache has 24"),
        ((*RUN, "train.precision=bf16"), "train.precision=bf16, where the cache has fp32"),
        ((*RUN, "model.image_size=64"), "model.image_size=64 differs from the cache at data.path="),
        ((*RUN, "data.captions.template='a {}'"), "data.captions.template=a {} differs from the cache"),
        ((*RUN, "sample.prompts=[another]"), "the caption 'another' is not in the cache"),
        ((*RUN, "task=lora", "task.text_encoder_filters=[.self_attn]"), "something in model.text_encoder trains, but"),
    ],
)
def test_a_run_that_the_cache_does_not_fit_is_refused_with_the_key(cached, capfd, arguments, message):
    assert message in train_refused(capfd, cached, *arguments)


def test_a_cache_that_lacks_what_the_model_needs_is_refused(tmp_path, capfd):
    folder = make_cache(tmp_path / "cache", "model.image_encoder=null", "data.samples=3")
    assert "lacks clip_img, which model.image_encoder makes of pictures" in train_refused(capfd, folder, *RUN)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("data.crop=random",), "data.crop=random draws anew each epoch"),
        (("data.flip_prob=0.5",), "set data.flip_prob=0"),
        (("data.buckets.random_share=0.05",), "set data.buckets.random_share=0"),
        (("data.captions.tags.separator=' '", "data.captions.tags.shuffle=true"), "data.captions draws anew each"),
        (("task=lora", "task.text_encoder_filters=[.self_attn]"), "a cache would hold what it made at first"),
        (("data=webdataset", "data.urls='pipe:cat x.tar'"), "what is streamed cannot be cached"),
    ],
)
def test_what_cannot_be_cached_is_refused_with_the_reason(tmp_path, capfd, arguments, message):
    defaults = {"task=": "task=finetune", "data=": "data=shapes"}
    chosen = [value for key, value in defaults.items() if not any(a.startswith(key) for a in arguments)]
    assert message in refused(capfd, "model=c_tiny", *chosen, f"out={tmp_path / 'cache'}", *arguments)
    assert not Path(tmp_path / "cache").exists()


def test_a_cache_is_no_part_of_other_data(cached, tmp_path, capfd):
    again = ("task=finetune", *MODEL, "data=cached", f"data.path={cached}", f"out={tmp_path / 'again'}")
    assert "is a cache already. Name the data that it was made of" in refused(capfd, *again)
    mixed = ("data=mixture", "+data@data.sources.a=cached", f"data.sources.a.path={cached}")
    message = refused(capfd, *SMALL, "task=finetune", *mixed, command=())
    assert "data.sources.a: a cache cannot be joined with other data" in message


def test_control_maps_are_held_too_and_train_as_without_a_cache(from_cache, tmp_path, capfd):
    control = ("task=controlnet", "filter@task.filter=canny", "task.bottleneck=small", f"model.weights={from_cache}")
    folder = make_cache(tmp_path / "cache", *control, "data.samples=8")
    run = (*control, *RUN, "train.max_steps=2")
    taken = (*run, "data=cached", f"data.path={folder}", "data.num_workers=0")
    without = train(tmp_path / "without", *run, *SHAPES, "data.samples=8")
    assert_equal_metrics(without, train(tmp_path / "with", *taken))
    message = train_refused(capfd, folder, *taken, "task.filter.low=50")
    assert "task.filter.low=50" in message
    assert "grids need pictures here" in train_refused(capfd, folder, *taken, "sample.every_steps=2")


def test_a_cache_without_control_maps_and_filters_that_draw_are_refused(cached, tmp_path, capfd):
    control = ("task=controlnet", "task.bottleneck=small")
    assert "lacks what the task makes of pictures" in train_refused(capfd, cached, *RUN, *control)
    drawing = ("model=c_tiny", *SHAPES, *control, "filter@task.filter=inpaint", f"out={tmp_path / 'cache'}")
    assert "InpaintFilter draws another map of a picture each epoch" in refused(capfd, *drawing)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("data.sources.b.background_weight=0.2", "data.sources.b.background_weight is 0.2 here and 1.0 there"),
        ("data.sources.a.captions.template='a {}'", "data.sources.a.captions.template is a {} here and None there"),
        ("data.loss_weights={a: 0.5}", "data.loss_weights.a is 0.5 here and None there"),
        ("data.sources.a.num_workers=1", None),
    ],
)
def test_a_cache_of_a_mixture_holds_to_what_each_part_was_made_by(half_mixture, tmp_path, capfd, changed, message):
    folder = shutil.copytree(half_mixture, tmp_path / "cache")
    if message is None:
        make_cache(folder, *MIXTURE, "task_index=1", changed)
        assert "is complete: 20 samples" in capfd.readouterr().out
    else:
        command = ("task=finetune", *MODEL, *MIXTURE, "unit_samples=10", "task_index=1", changed, f"out={folder}")
        assert f"holds another cache: {message}" in refused(capfd, *command)


CONDITIONS = ("model.semantic_noise=0.2", "task.image_keep_prob=0.5", "task.cond_drop_prob=0.3")


def test_stage_b_and_masks_train_from_a_cache_as_without(tmp_path, monkeypatch, capfd):
    decoder = ("model=b_tiny", *B_NARROW, "model.image_size=96", "task=reconstruction", *CONDITIONS)
    short = ("train.global_batch_size=4", "train.max_steps=2", "optimizer.lr=3e-3")
    data = (*SHAPES, "data.background_weight=0.1")
    without = train(tmp_path / "without", *decoder, *short, *data, *VALIDATED)
    assert launch(["cache", *decoder, *data, "unit_samples=10", "batch_size=4", f"out={tmp_path / 'cache'}"]) == 0
    lighter = (*decoder, *SHAPES, "data.background_weight=0.2", "unit_samples=10", f"out={tmp_path / 'cache'}")
    assert "data.background_weight is 0.2 here and 0.1 there" in refused(capfd, *lighter)
    for part in (TextEncoder, VQGAN, ConvolutionalCompressor):
        monkeypatch.setattr(part, "encode", lambda *_: pytest.fail("something was encoded"))
    taken = (*decoder, *short, *VALIDATED, "data=cached", f"data.path={tmp_path / 'cache'}", "data.num_workers=0")
    assert_equal_metrics(without, train(tmp_path / "with", *taken))
    again = (*taken[len(decoder) :], "validate.reconstructions=2", f"run.dir={tmp_path / 'more'}")
    assert "validate.reconstructions: are of pictures" in refused(capfd, *once(*SMALL, *decoder, *again), command=())
