"""What trains in Stable Diffusion's text towers: weights, adapters and tokens, and the files that diffusers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors.torch import load_file

from cascade_train.errors import ConfigError
from cascade_train.models.formats.export_lora import export_lora
from cascade_train.models.formats.lora_files import read_lora
from cascade_train.models.lora import ADAPTER, adapted_layers, layer_parts, tower_name
from cascade_train.models.stable_diffusion.family import STABLE_DIFFUSION
from cascade_train.models.tokens import trained_tokens
from tests.unit.models.stages import build_stage, make_stage
from tests.unit.tasks.as_diffusers import assert_equal_gradients, reference_loss
from tests.unit.tasks.task_contract import CPU, TaskContract, batch_for, component, left, trainable

FAMILIES = {"sd_tiny": StableDiffusionPipeline, "sdxl_tiny": StableDiffusionXLPipeline}
TRAINED = {"sd_tiny": ("text_encoder",), "sdxl_tiny": ("text_encoder", "text_encoder_2")}
TOKENS = [["[fernando]", "^star"], ["<star>", None], ["^red</w>", None]]


def make(model: str, option: str = "finetune", towers: Any = None, **changes: Any) -> Any:
    """Return a task attached to a stage whose towers train, or have these options."""
    options = {"train": True} if towers is None else towers
    task = component("task", option, **changes)
    stage = build_stage(model, dict.fromkeys(TRAINED[model], options))
    task.check_stage(stage)
    task.attach(stage, component("objective", "ddpm"), CPU)
    return task


class TestFinetuneWithTextTowers(TaskContract):
    option, model, objective = "finetune", "sdxl_tiny", "ddpm"

    @classmethod
    def make(cls) -> Any:
        return make(cls.model)


class TestLoraOfTextTowers(TaskContract):
    option, model, objective = "lora", "sdxl_tiny", "ddpm"
    changes = {"text_encoder_filters": [".self_attn"], "train_tokens": TOKENS, "cond_drop_prob": 0.0}
    lr = 1e-2

    @classmethod
    def make(cls) -> Any:
        return make(cls.model, cls.option, {}, **cls.changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_is_that_of_diffusers_and_torch(family: str, tmp_path: Path) -> None:
    task = make(family, cond_drop_prob=0.0)
    pipeline = FAMILIES[family].from_pretrained(left(task, "pipeline", tmp_path))
    batch = batch_for(task, 0, 1, 2)
    prepared = task.prepare_batch(batch)
    output = task.loss(prepared)
    output.loss_B.mean().backward()
    expected_B = reference_loss(pipeline, batch, prepared)
    expected_B.mean().backward()
    torch.testing.assert_close(output.loss_B, expected_B, atol=1e-5, rtol=1e-5)
    for root in ("unet", *TRAINED[family]):
        ours = task.stage.network if root == "unet" else getattr(task.stage, root).module
        assert_equal_gradients(ours, getattr(pipeline, root))


def test_a_pipeline_has_the_towers_that_trained_and_they_come_back(tmp_path: Path) -> None:
    task = make("sdxl_tiny")
    with torch.no_grad():
        for name in TRAINED["sdxl_tiny"]:
            for parameter in getattr(task.stage, name).module.parameters():
                parameter.add_(0.5)
    folder = left(task, "pipeline", tmp_path / "export")
    task.stage.scheduler = None
    alone = left(task, "pipeline", tmp_path / "alone")
    assert sorted(path.name for path in alone.glob("[!.]*")) == ["text_encoder", "text_encoder_2", "unet"]
    pipeline, fresh = StableDiffusionXLPipeline.from_pretrained(folder), make("sdxl_tiny")
    fresh.load_export(tmp_path / "export")
    for name in TRAINED["sdxl_tiny"]:
        state = getattr(task.stage, name).module.state_dict()
        for found in (getattr(pipeline, name), getattr(fresh.stage, name).module):
            assert all(torch.equal(value, state[key]) for key, value in found.state_dict().items())
        for place in (folder, alone):
            stored = load_file(place / name / "model.safetensors")
            assert {key.partition(".")[0] for key in stored} <= {"text_model", "text_projection"}, "as published"


def test_towers_have_a_learning_rate_of_their_own() -> None:
    (phase,) = make("sdxl_tiny", towers={"train": True, "lr": 1e-6}).phases()
    assert phase.lrs == {"text_encoder": 1e-6, "text_encoder_2": 1e-6}
    (phase,) = make("sd_tiny", "lora", {"lr": 1e-5}, text_encoder_filters=[".self_attn"]).phases()
    assert phase.lrs == {"text_encoder": 1e-5}
    assert make("sd_tiny").phases()[0].lrs == {}
    assert make("sdxl_tiny").phases()[0].until == {}
    (phase,) = make("sdxl_tiny", towers={"train": True, "stop_after": 0.5}).phases()
    assert phase.until == {"text_encoder": 0.5, "text_encoder_2": 0.5}


def test_what_no_text_comes_of_is_left_as_it_is() -> None:
    lora = make("sdxl_tiny", "lora", {}, text_encoder_filters=[".self_attn"])
    layers = {name for name, _ in adapted_layers(lora.stage.text_encoder.module)}
    assert layers
    assert all("layers.0." in name for name in layers), "hidden_layer=-2 of two"
    assert {name.split(".")[3] for name, _ in adapted_layers(lora.stage.text_encoder_2.module)} == {"0", "1"}
    frozen = [name for name, p in make("sdxl_tiny").stage.text_encoder.module.named_parameters() if not p.requires_grad]
    assert frozen
    assert all("layers.1." in name or "final_layer_norm" in name for name in frozen)


def test_stored_adapters_of_unused_layers_are_left_out() -> None:
    """sd-scripts adapts all layers."""
    lora = make("sdxl_tiny", "lora", {}, text_encoder_filters=[".self_attn"])
    layers = dict(adapted_layers(lora.stage.text_encoder.module))
    (name, layer), *_ = layers.items()
    state = {
        f"{tower_name(n)}.{p}": torch.ones_like(v) for n, each in layers.items() for p, v in layer_parts(each).items()
    }
    unused = {key.replace("layers.0.", "layers.1."): value for key, value in state.items()}
    lora._load_tower("text_encoder", state | unused, None, "from=x")
    assert all(bool((value == 1).all()) for value in layer_parts(layers[name]).values())
    with pytest.raises(ConfigError, match=r"set task\.module_filters, task\.text_encoder_filters and task\.dora as"):
        lora._load_tower(
            "text_encoder", {**state, "text_model.encoder.layers.0.mlp.fc1.a": torch.ones(1)}, None, "from=x"
        )
    with pytest.raises(ConfigError, match=r"task\.text_encoder_filters: selects only modules whose output is not"):
        make("sdxl_tiny", "lora", {}, text_encoder_filters=[r"layers.1."])


def test_both_towers_layers_have_one_name_in_ranks() -> None:
    ranks = [["text_model.encoder.layers.0", 5]]
    lora = make("sdxl_tiny", "lora", {}, text_encoder_filters=[".self_attn"], rank=2, ranks=ranks)
    for name, encoder in lora.stage.text_encoders().items():
        found = {layer.r[ADAPTER] for each, layer in adapted_layers(encoder.module) if "layers.0." in each}
        assert found == {5}, name


@pytest.mark.parametrize("family", FAMILIES)
def test_diffusers_loads_adapters_and_tokens_of_the_towers(family: str, tmp_path: Path) -> None:
    ranks = [["text_encoder.*q_proj", 1, 3.0], ["^text_encoder", 3]]
    options = {"text_encoder_filters": [".self_attn"], "rank": 2, "alpha": 4.0, "ranks": ranks}
    task = make(family, "lora", {}, **options, train_tokens=TOKENS[:2])
    roots = task.phases()[0].modules
    assert set(roots) == {"network", *TRAINED[family]}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in trainable(task.phases()[0]).items():
            if "lora_B" in name or name.endswith(".shift"):
                parameter.normal_(0.0, 0.3, generator=generator)
    folder = left(task, "lora", tmp_path)
    pipeline = FAMILIES[family].from_pretrained(left(make(family, towers={}), "pipeline", tmp_path))
    files = {name: load_file(folder / "embeddings" / f"{name}.safetensors") for name in ("fernando", "star")}
    for token, file in (("[fernando]", "fernando"), ("<star>", "star")):
        if family == "sd_tiny":
            pipeline.load_textual_inversion(folder / "embeddings" / f"{file}.safetensors")
        else:
            assert {value.ndim for value in files[file].values()} == {2}
            for key, number in (("clip_l", ""), ("clip_g", "_2")):
                parts = {name: getattr(pipeline, f"{name}{number}") for name in ("text_encoder", "tokenizer")}
                pipeline.load_textual_inversion(files[file][key], token=token, **parts)
    pipeline.load_lora_weights(folder)
    prompts = ["a [fernando] dog", "the <star> of [fernando]"]
    found = pipeline.encode_prompt(prompts, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False)
    cond = task.stage.conditions(task.stage.tokenize(prompts))
    torch.testing.assert_close(found[0], cond["encoder_hidden_states"], atol=1e-5, rtol=1e-4)
    if family == "sdxl_tiny":
        torch.testing.assert_close(found[2], cond["text_embeds"], atol=1e-5, rtol=1e-4)
    again = make(family, "lora", {}, **options, train_tokens=TOKENS[:2], seed=7, weights=str(folder))
    for name, encoder in again.stage.text_encoders().items():
        state = roots[name].state_dict()
        ours, theirs = trained_tokens(encoder).stored().rows, trained_tokens(getattr(task.stage, name)).stored().rows
        torch.testing.assert_close(ours, theirs)
        adapters = {key: value for key, value in encoder.module.state_dict().items() if ".lora_" in key}
        assert all(torch.equal(value, state[key]) for key, value in adapters.items())


@pytest.mark.parametrize(("family", "prefixes"), [("sd_tiny", {"te"}), ("sdxl_tiny", {"te1", "te2"})])
def test_other_programs_find_the_towers_under_kohyas_names(family: str, prefixes: set[str], tmp_path: Path) -> None:
    ranks = [["text_encoder_2", 8], ["fc1", 2, 1.5]]
    ranks = ranks if family == "sdxl_tiny" else ranks[1:]
    task = make(family, "lora", {}, text_encoder_filters=[".mlp"], train_tokens=TOKENS[:1], ranks=ranks)
    folder, network = left(task, "lora", tmp_path), task.stage.network
    modules = {name: tuple(layer.get_base_layer().weight.shape) for name, layer in adapted_layers(network)}
    lora = read_lora(str(folder), key="from", family=STABLE_DIFFUSION, modules=modules)
    file = tmp_path / "kohya.safetensors"
    assert export_lora(lora, network, file, format="kohya") < 1e-6
    names = {name.split("_")[1] for name in load_file(file)}
    assert names == {"unet", *prefixes}
    assert (tmp_path / "kohya.embeddings" / "fernando.safetensors").is_file()
    found = read_lora(str(file), key="from", family=STABLE_DIFFUSION, modules=modules)
    assert found.state.keys() == lora.state.keys()
    assert {name for name in lora.by_root() if name} == set(TRAINED[family])
    own = {name for ranks in (lora.spec.ranks, found.spec.ranks, found.spec.alphas) for name in ranks}
    assert {name.partition(".")[0] for name in own} == set(TRAINED[family])
    assert all(found.spec.of(name) == lora.spec.of(name) for name in own)
    if family == "sdxl_tiny":
        with pytest.raises(ConfigError, match="contains text_encoder_2 weights, and stable_diffusion has one text"):
            make("sd_tiny", "lora", {}, text_encoder_filters=[".mlp"])._load_tower("text_encoder_2", {}, None, "from=x")


@pytest.mark.parametrize("family", ["sd_tiny", "sdxl_tiny"])
def test_tokens_that_kohyas_format_has_no_place_for_are_refused_before_anything_is_written(
    family: str, tmp_path: Path
) -> None:
    task = make(family, "lora", {}, train_tokens=[*TOKENS[:1], ["^black</w>", None]])
    folder, network = left(task, "lora", tmp_path), task.stage.network
    modules = {name: tuple(layer.get_base_layer().weight.shape) for name, layer in adapted_layers(network)}
    lora, out = read_lora(str(folder), key="from", family=network.family, modules=modules), tmp_path / "out"
    with pytest.raises(ConfigError, match=r"format=kohya: has no place for .* \(black</w>\).*use format=peft"):
        export_lora(lora, network, out / "kohya.safetensors", format="kohya")
    assert not out.exists()
    assert export_lora(lora, network, out / "lora", format="peft") < 1e-6


@pytest.mark.parametrize(
    ("option", "towers", "message"),
    [
        ("lora", {"train": True}, r"text_encoder\.train=true: is for task=finetune, and a LoRA leaves the weights"),
        ("controlnet", {"train": True}, r"train=true: is for task=finetune, and a ControlNet leaves the weights"),
        ("lora", {"stop_after": 9}, r"model\.text_encoder\.stop_after=9: nothing in this tower trains; leave it null"),
        ("finetune", {"lr": 1e-5}, r"model\.text_encoder\.lr=1e-05: nothing in this tower trains; leave it null"),
    ],
)
def test_towers_that_cannot_train_are_refused(option: str, towers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        component("task", option).check_stage(make_stage("sd_tiny", {"text_encoder": towers}))


@pytest.mark.parametrize(
    ("model", "towers", "message"),
    [
        ("c_tiny", {"train": True}, r"model\.text_encoder\.train=true: the text tower of stage_c stays as it is"),
        ("sd_tiny", {"stop_after": 0}, r"text_encoder\.stop_after=0 must be greater than 0"),
        ("sd_tiny", {"stop_after": 1.5}, r"text_encoder\.stop_after=1\.5: give whole optimizer steps, or a share"),
        ("sd_tiny", {"lr": 0.0}, r"text_encoder\.lr=0\.0 must be greater than 0"),
    ],
)
def test_options_of_a_tower_out_of_place_are_refused(model: str, towers: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        make_stage(model, {"text_encoder": towers})


def test_an_average_of_the_network_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="ema.weights=somewhere: has no average of the text towers, which train"):
        make("sd_tiny").initial_average("somewhere")
