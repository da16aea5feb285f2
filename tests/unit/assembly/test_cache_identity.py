"""Weights count by their content, wherever they lie, and by name where they are not on this machine."""

import pytest

from cascade_train.assembly.cache_identity import (
    content,
    data_identity,
    encoder_identity,
    refuse_reconstruction,
    task_identity,
)
from cascade_train.data.cached import same_option
from cascade_train.errors import ConfigError
from tests.unit.models.stages import make_stage, model_config
from tests.unit.tasks.task_contract import component


def test_weights_count_by_content_wherever_they_lie(tmp_path):
    for name, text in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name / "text_encoder").mkdir(parents=True)
        (tmp_path / name / "text_encoder" / "model.safetensors").write_bytes(text)
    one, moved, other = (content(str(tmp_path / name), "text_encoder") for name in "abc")
    assert same_option(one, moved)
    assert not same_option(one, other)
    assert other.startswith(f"{tmp_path}/c/text_encoder, SHA-256 ")
    assert same_option(content(str(tmp_path / "a" / "text_encoder" / "model.safetensors"), None), one)


def test_weights_that_are_not_here_count_by_name():
    absent = content("nobody/nothing", "text_encoder")
    assert absent == "nobody/nothing/text_encoder, SHA-256 unknown"
    known = absent.replace("unknown", "00")
    assert same_option(absent, known)
    assert not same_option(content("nobody/other", "text_encoder"), known)
    assert content(None, None) is None


def test_seeded_encoders_do_not_depend_on_the_weights_that_are_named():
    stage = make_stage("c_tiny")
    cfg = {"train": {"precision": "fp32"}, "model": {**model_config("c_tiny"), "random_encoders": True}}
    cfg["model"]["text_encoder"] = {**cfg["model"]["text_encoder"], "weights": "nobody/nothing"}
    found = encoder_identity(cfg, stage, ["effnet_latent", "clip_text"])
    assert found["model.text_encoder.weights"] is None
    assert found["model.text_encoder.max_tokens"] == 24
    assert not any(key.startswith("model.previewer") for key in found)


def test_a_filter_counts_by_its_arguments_and_the_content_of_its_files(tmp_path):
    for name, text in (("a.pth", b"1"), ("b.pth", b"1"), ("c.pth", b"2")):
        (tmp_path / name).write_bytes(text)

    def identity(weights, **changed):
        target = "cascade_train.filters.sketch.SketchFilter"
        node = {"_target_": target, "weights": str(tmp_path / weights), "resize": None, **changed}
        return task_identity({"task": {"_target_": "x.Y", "filter": node, "bottleneck": "small"}})

    one, copied, other = (identity(name)["task.filter.weights"] for name in ("a.pth", "b.pth", "c.pth"))
    assert same_option(one, copied)
    assert not same_option(one, other)
    assert identity("a.pth", resize=512)["task.filter.resize"] == 512


def test_data_count_by_every_option_that_makes_a_sample(tmp_path):
    (tmp_path / "classes.json").write_text("{}")
    node = {
        "_target_": "cascade_train.data.classification.ClassFolders",
        "path": "pictures",
        "idx_to_prompt": str(tmp_path / "classes.json"),
        "num_workers": 4,
        "shuffle_window_shards": 2,
        "crop": "center",
        "captions": {"_target_": "cascade_train.data.captions.Captions", "key": "prompts"},
    }
    assert data_identity({"data": {"_target_": "x.Y", "sources": {"mine": node}}}) == {
        "data._target_": "x.Y",
        "data.sources.mine._target_": node["_target_"],
        "data.sources.mine.idx_to_prompt": content(str(tmp_path / "classes.json"), None),
        "data.sources.mine.crop": "center",
        "data.sources.mine.captions._target_": "cascade_train.data.captions.Captions",
        "data.sources.mine.captions.key": "prompts",
    }


@pytest.mark.parametrize(("model", "objective"), [("a_tiny", "vqgan"), ("c_tiny", "preview")])
def test_what_trains_on_pictures_takes_no_cache(model, objective):
    task = component("task", "reconstruction").for_objective(component("objective", objective))
    with pytest.raises(ConfigError, match="latents trains on pictures, why"):
        refuse_reconstruction(make_stage(model), task, "why")
    refuse_reconstruction(make_stage("c_tiny"), component("task", "finetune"), "why")
