"""Recipes: a training file of the original becomes an experiment that composes, and says what it left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cascade_train.__main__ import launch
from cascade_train.config.saved import to_plain
from tests.unit.config.composing import checked, composed
from tests.unit.config.defaults import RECIPES, differences, leaves_and_nodes, recipe_values
from tests.unit.config.test_every_option import CONTROLNETS

pytestmark = pytest.mark.usefixtures("every_extra_installed")

PLACES = {
    "checkpoint_path": "/path/to/checkpoint",
    "output_path": "/path/to/samples",
    "wandb_project": "StableCascade",
    "wandb_entity": "wandb_username",
    "webdataset_path": ["s3://path/to/your/first/dataset/on/s3", "file:/path/to/your/local/dataset.tar"],
}
"""What every official file has beside the values in tests/golden/original."""


def run(folder: Path, source: dict[str, Any] | str, *more: str) -> tuple[int, Path]:
    """Import a configuration as experiment `mine` and return the exit code and the folder for --config-dir."""
    text = source if isinstance(source, str) else yaml.safe_dump(source)
    (folder / "given.yaml").write_text(text)
    out = folder / "conf" / "experiment" / "mine.yaml"
    return launch(["recipe", "import", str(folder / "given.yaml"), f"out={out}", *more]), folder / "conf"


def made(folder: Path, source: dict[str, Any] | str, *more: str) -> Path:
    """Import a configuration as experiment `mine` and return the folder for --config-dir."""
    code, conf = run(folder, source, *more)
    assert code == 0
    return conf


def official(name: str, **changes: Any) -> dict[str, Any]:
    return {**PLACES, **RECIPES[name], **changes}


EVERYWHERE = {"data.replacement": True, "optimizer.decay": "all", "lr_scheduler.from_zero": True}
ONE_SHAPE = {"data.crop": "saliency"}
SEVERAL_SHAPES = {"data.crop": "random", "data.buckets.distance": "linear", "data.buckets.random_share": 0.05}
ADAPTIVE = {"objective.loss_weight.update": "micro_batch", "objective.loss_weight.duplicates": "last"}
STAGE_C = {"model.image_encoder.antialias": False}
STAGE_B = {"objective.noise.square_grids": True}
ADAPTERS = {"task.init": "original", "task.alpha": 1.0, "task.joint_qkv": True}
BEHAVIOUR: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("finetune_c_3b", "finetune_c_3b_lowres", "finetune_c_3b_v"), SEVERAL_SHAPES | ADAPTIVE | STAGE_C),
    "finetune_c_1b": ONE_SHAPE | STAGE_C,
    "finetune_c_3b_lora": SEVERAL_SHAPES | STAGE_C | ADAPTERS,
    **dict.fromkeys(("finetune_b_3b", "finetune_b_700m"), ONE_SHAPE | ADAPTIVE | STAGE_B),
    **dict.fromkeys(CONTROLNETS, ONE_SHAPE | STAGE_C),
}
"""What the original does beside `EVERYWHERE` where its files are silent, by file."""


@pytest.mark.parametrize("name", RECIPES)
def test_an_imported_official_file_has_its_values_and_the_behaviour_of_its_trainer(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path, official(name))
    values = {k: v for k, v in recipe_values(name, imported=True).items() if not k.startswith("defaults.")}
    places = {
        "run.dir": f"/path/to/checkpoint/{RECIPES[name]['experiment_id']}",
        "tracker.project": "StableCascade",
        "tracker.entity": "wandb_username",
        "data.urls": PLACES["webdataset_path"],
    }
    behaviour = EVERYWHERE | BEHAVIOUR[name]
    cfg = composed("experiment=mine", *CONTROLNETS.get(name, []), extra=folder)
    assert not differences(cfg, values | places | behaviour)
    written = (folder / "experiment" / "mine.yaml").read_text().replace("\n# ", " ")
    for text in (capsys.readouterr().out, written):
        assert "behaviour=original: set as the original trainer does" in text
        assert all(f"{key}={str(value).lower()}" in text for key, value in behaviour.items())


@pytest.mark.parametrize("name", RECIPES)
def test_an_imported_official_file_equals_the_recipe_that_ships(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path, official(name), "behaviour=ours")
    for text in (capsys.readouterr().out, (folder / "experiment" / "mine.yaml").read_text()):
        assert "behaviour=ours: left to this library" in text
    files = CONTROLNETS.get(name, [])
    mine = checked("experiment=mine", *files, extra=folder)
    ours = checked(f"experiment={name}", "data.urls=[a.tar]", *files)
    for node in ("train", "optimizer", "lr_scheduler", "objective", "parallel", "checkpoint", "sample", "ema"):
        assert mine[node] == ours[node], node
    if name == "finetune_c_3b_lora":  # ours trains with the original's first values
        assert not differences(ours, ADAPTERS)
        assert len(differences(mine, ADAPTERS)) == len(ADAPTERS)
    else:
        assert mine.task == ours.task
    assert mine.model.image_size == ours.model.image_size
    assert mine.model.network == ours.model.network
    keys = ("data.aspect_ratios", "data.row_filters", *(EVERYWHERE | BEHAVIOUR[name]).keys() - ADAPTERS.keys())
    values = dict(leaves_and_nodes(to_plain(ours)))
    assert not differences(mine, {key: values.get(key, "absent") for key in keys})


def test_filters_and_the_average_are_taken_over(tmp_path: Path) -> None:
    filters = [["normalized_score", "lambda s: s > 9"], ["width", "lambda w: w >= 768"]]
    given = official("finetune_c_3b", dataset_filters=filters, ema_start_iters=5000, ema_iters=100, ema_beta=0.9)
    folder = made(tmp_path, {**given, "grad_accum_steps": 4})
    cfg = checked("experiment=mine", extra=folder)
    assert cfg.data.row_filters == filters
    assert (cfg.ema.start_step, cfg.ema.every_steps, cfg.ema.decay) == (1251, 25, 0.9)
    assert cfg.train.micro_batch_size == 128


def test_what_has_no_equivalent_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = official("finetune_c_3b_v", captions_getter=["old_caption", "captions_getter"], dtype="bfloat16", odd_key=3)
    made(tmp_path, given)
    text = capsys.readouterr().out
    for line in ("odd_key: unknown", "captions_getter: ['old",
                 "dtype: trained weights stay fp32", "output_path: a run logs",
                 "s3:// is read through boto3", "edm_objective: objective.target._target_="):  # fmt: skip
        assert line in text
    kept = yaml.safe_load((tmp_path / "conf" / "experiment" / "mine.yaml").read_text())
    assert "odd_key" not in kept
    assert kept["data"]["aspect_ratios"] == RECIPES["finetune_c_3b_v"]["multi_aspect_ratio"]


def test_keys_of_a_controlnet_are_translated(tmp_path: Path) -> None:
    control = {"controlnet_blocks": [0, 4, 51, 55], "controlnet_filter": "InpaintFilter", "offset_noise": 0.1,
               "controlnet_filter_params": {"thresold": [0.04, 0.4], "p_outpaint": 0.4},
               "controlnet_bottleneck_mode": "simple", "batch_size": 256}  # fmt: skip
    made(tmp_path, official("finetune_c_3b", **control, adaptive_loss_weight=None))
    kept = yaml.safe_load((tmp_path / "conf" / "experiment" / "mine.yaml").read_text())
    assert {"override /task": "controlnet"} in kept["defaults"]
    assert {"override /filter@task.filter": "inpaint"} in kept["defaults"]
    cfg = checked("experiment=mine", extra=tmp_path / "conf")
    assert (cfg.task.filter.threshold, cfg.task.filter.p_outpaint) == ([0.04, 0.4], 0.4)
    assert (kept["task"]["blocks"], kept["task"]["bottleneck"]) == ([0, 4, 51, 55], "simple")
    assert kept["objective"] == {"offset_noise": 0.1}


def test_a_filter_that_is_not_the_originals_is_left_to_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = {"controlnet_blocks": [0], "controlnet_filter": "MyFilter", "controlnet_filter_params": {"level": 1}}
    folder = made(tmp_path, official("finetune_c_3b", **control, adaptive_loss_weight=None))
    why = "controlnet_filter: MyFilter is no filter of the original: name your class by task.filter._target_"
    assert why in capsys.readouterr().out
    given = "task.filter._target_=tests.unit.config.members.Level"
    cfg = composed("experiment=mine", given, extra=folder)
    assert cfg.task.filter == {"_target_": "tests.unit.config.members.Level", "level": 1}


def test_a_key_that_the_task_does_not_take_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path, official("finetune_b_3b", previewer_checkpoint_path="models/previewer.safetensors"))
    text = "previewer_checkpoint_path: model.previewer.weights=models/previewer.safetensors is left out"
    assert text in capsys.readouterr().out
    assert "previewer" not in checked("experiment=mine", extra=folder).model


def test_a_list_of_urls_in_a_file_is_left_to_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path, official("finetune_c_3b", webdataset_path="sets.yml"))
    assert "webdataset_path: data.urls=[...], the entries of sets.yml" in capsys.readouterr().out
    assert checked("experiment=mine", "data.urls=[a.tar]", extra=folder).data.urls == ["a.tar"]


def test_signatures_of_addresses_are_not_printed_and_the_command_is_quoted(tmp_path: Path, capsys) -> None:
    signed = official("finetune_c_3b", webdataset_path="s3://a/b.tar?X-Amz-Signature=abcdef0123456789")
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(signed))
    out = tmp_path / "my own" / "experiment" / "mine.yaml"
    assert launch(["recipe", "import", f"{tmp_path}/theirs.yaml", f"out={out}"]) == 0
    text = capsys.readouterr().out
    assert "abcdef0123456789" not in text
    assert f"Run it: cascade-train --config-dir '{tmp_path}/my own' experiment=mine" in text


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ({"model": 3}, (), "model_version=None is no model of Stable Cascade"),
        ("[1, 2]", (), "given.yaml"),
        ("a: [1", (), "given.yaml"),
        (official("finetune_c_3b", batch_size="many"), (), "batch_size='many' must be a whole number"),
        (official("finetune_c_3b", updates="many"), (), "updates: train.max_steps=many"),
        (official("finetune_c_3b", model_version="7B"), (), "model_version=7B is no model of Stable Cascade"),
        (official("finetune_c_3b_lora"), ("ranks=3",), "does not divide into grad_accum_steps=4 passes of 3 ranks"),
        (official("finetune_c_3b"), ("ranks=0",), "ranks=0 must be at least 1"),
        (official("finetune_c_3b"), ("behaviour=mine",), "behaviour=mine is unknown; choose one of original, ours"),
        (official("finetune_c_3b"), ("out=mine.yaml",), "must be named experiment/<name>.yaml"),
    ],
)
def test_what_cannot_be_imported_is_refused_and_nothing_is_written(
    source: Any, more: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = run(tmp_path, source, *more)
    assert code == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_a_file_is_replaced_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, official("finetune_c_3b"))
    assert run(tmp_path, official("finetune_c_3b"))[0] == 2
    assert "overwrite=true" in capsys.readouterr().err
    made(tmp_path, official("finetune_c_3b"), "overwrite=true")


COMMAND, SECRET = "pipe:touch X; cat a.tar", "n_${oc.env:HOME}"
CONTROL = {"controlnet_blocks": [0], "controlnet_filter": "CannyFilter", "adaptive_loss_weight": None}
STRANGE: list[tuple[str, dict[str, Any]]] = [
    ("webdataset_path", {"webdataset_path": COMMAND}),
    ("webdataset_path", {"webdataset_path": ["a.tar", COMMAND]}),
    ("webdataset_path", {"webdataset_path": ["{pip,x}e:touch X"]}),
    ("webdataset_path", {"webdataset_path": " PIPE:touch X"}),
    ("wandb_entity", {"wandb_entity": SECRET}),
    ("experiment_id", {"experiment_id": SECRET}),
    ("generator_checkpoint_path", {"generator_checkpoint_path": SECRET}),
    ("captions_getter", {"captions_getter": ["json", "lambda x: '$' + x['caption']"]}),
    ("dataset_filters", {"dataset_filters": [["a", "lambda s: s == '${oc.env:HOME}'"]]}),
    ("module_filters", {"module_filters": [{"_target_": "os.system"}]}),
    ("controlnet_filter_params", {**CONTROL, "controlnet_filter_params": {"${oc.env:HOME}": 1}}),
    ("controlnet_filter_params", {**CONTROL, "controlnet_filter_params": {"_target_": "os.system"}}),
]


@pytest.mark.parametrize(("key", "changes"), STRANGE)
def test_no_command_no_interpolation_and_no_class_of_a_file_comes_into_a_recipe(
    key: str, changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path, official("finetune_c_3b", **changes))
    text = (folder / "experiment" / "mine.yaml").read_text()
    assert not any(word in text.lower() for word in ("pipe:", "${", "oc.env", "os.system", "e:touch"))
    assert key in capsys.readouterr().out.partition("Left to you:")[2]


def test_the_originals_choice_of_captions_is_taken_over(tmp_path: Path) -> None:
    folder = made(tmp_path, official("finetune_c_3b", captions_getter=["json", "captions_getter"]))
    keys = {"caption": 0.95, "old_caption.og_caption": 0.05}
    assert checked("experiment=mine", extra=folder).data.captions.key == keys


def test_keys_and_values_with_control_characters_are_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = {"a\x1b[2J\nrun: {dir: /}": 1, "b\ud800": "\ud800", "c[0": "${x:y}", "wandb_project": "p\x1b[31m"}
    source = tmp_path / "in.yaml"
    source.write_text(json.dumps(official("finetune_c_3b") | strange))
    out = tmp_path / "experiment" / "mine.yaml"
    assert launch(["recipe", "import", str(source), f"out={out}"]) == 0
    said = capsys.readouterr().out
    assert r"a\x1b[2J\nrun: {dir: /}" in said
    assert "\x1b" not in said + out.read_text()
    assert yaml.safe_load(out.read_text())["run"]["dir"] != "/"
