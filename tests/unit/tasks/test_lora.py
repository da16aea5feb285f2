"""Adapter training: fp32 adapters on a frozen base, and files that put them onto the base again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cascade_train.errors import ConfigError
from cascade_train.models.formats.export_lora import export_lora
from cascade_train.models.formats.lora_files import module_shapes, read_lora
from cascade_train.models.lora import adapted_layers
from tests.unit.models.small_networks import load_lora
from tests.unit.models.stages import build_stage
from tests.unit.tasks.task_contract import TaskContract, attached, component, left, make_batch, trainable


class TestLoRA(TaskContract):
    option = "lora"
    model = "c_tiny"


class TestLoRAOnEveryLayer(TestLoRA):
    changes = {"module_filters": None, "rank": 2}


TOKENS = [["[fernando]", "^star</w>"], ["^red</w>", None]]


class TestLoRAWithRanks(TestLoRA):
    changes = {"ranks": [["to_q", 1], ["text_encoder", 8, 2.0]], "text_encoder_filters": [".self_attn"], "dora": True}


class TestLoRAAsTheOriginal(TestLoRA):
    @pytest.fixture(scope="class")
    @classmethod
    def task(cls) -> Any:
        return make(joint_qkv=True, init="original", alpha=1.0, train_tokens=TOKENS)


class TestLoKr(TestLoRA):
    changes = {"kind": "lokr", "rank": 2, "text_encoder_filters": [".self_attn"], "train_tokens": TOKENS}


class TestLoHa(TestLoRA):
    changes = {"kind": "loha", "rank": 2, "preserve": [["circle", "ring"]], "ranks": [["to_q", 1, 3.0]]}


def make(**changes: Any) -> Any:
    return attached(component("task", "lora", **changes), "c_tiny")


@pytest.mark.parametrize("filters", [None, [".self_attn"]])
def test_the_first_values_are_those_of_every_adapter(filters: list[str] | None) -> None:
    task = make(init="original", dora=True, text_encoder_filters=filters)
    state = {n: p for root in task.phases()[0].modules.values() for n, p in root.named_parameters() if ".lora_" in n}
    assert any("self_attn" in name for name in state) == (filters is not None)
    assert all(value.eq(0).all() == ("lora_A" in name) for name, value in state.items())


def test_joint_projections_share_one_parameter() -> None:
    apart, joint = (make(joint_qkv=j) for j in (False, True))
    attentions = sum(name.endswith(".to_q") for name, _ in adapted_layers(joint.stage.network))
    assert attentions == 8
    counts = [len(trainable(task.phases()[0])) for task in (apart, joint)]
    assert counts[0] - counts[1] == 2 * attentions


def test_joint_projections_are_stored_as_three_and_trained_on(tmp_path: Path) -> None:
    joint = make(joint_qkv=True)
    left(joint, "lora", tmp_path / "export")
    for together in (False, True):
        again = make(joint_qkv=together, seed=7, weights=str(tmp_path))
        found, expected = (dict(task.stage.network.state_dict()) for task in (again, joint))
        assert all(torch.equal(found[name], value) for name, value in expected.items() if ".lora_" in name)


def test_projections_that_were_trained_apart_are_not_joined(tmp_path: Path) -> None:
    apart = make()
    left(apart, "lora", tmp_path / "export")
    with pytest.raises(ConfigError, match="its q, k and v begin with halves of their own; set task.joint_qkv=false"):
        make(joint_qkv=True, weights=str(tmp_path))


def test_the_frozen_base_is_in_eval_mode_and_only_adapter_dropout_trains() -> None:
    task = make(dropout=0.1)
    training = {name for name, module in task.stage.network.named_modules() if module.training}
    assert training
    assert all(".lora_dropout" in name for name in training)


def test_a_bf16_base_trains_fp32_adapters_and_keeps_no_gradient() -> None:
    stage = build_stage("c_tiny", dtype=torch.bfloat16)
    torch.nn.init.normal_(stage.network.clf[1].weight, std=0.1)
    task = component("task", "lora")
    task.attach(stage, component("objective", "gdf"), torch.device("cpu"))
    output = task.loss(task.prepare_batch(make_batch(0, 1)))
    assert output.loss_B.dtype == torch.float32
    output.loss_B.mean().backward()
    for name, parameter in stage.network.named_parameters():
        assert (parameter.grad is not None) == (".lora_" in name)
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16)


def test_adapters_left_behind_predict_the_same_on_a_fresh_base_and_are_taken_up(tmp_path: Path) -> None:
    task = with_values(make())
    folder = left(task, "lora", tmp_path / "export")
    plain = attached(component("task", "finetune"), "c_tiny")
    load_lora(plain.stage.network.eval(), str(folder))
    inputs = torch.randn(1, 16, 3, 3), torch.tensor([0.4]), task.stage.conditions(task.stage.tokenize(["a circle"]))
    assert torch.equal(plain.stage.predict(*inputs), task.stage.predict(*inputs))

    other = make(seed=9)
    other.load_export(tmp_path / "export")
    state = task.stage.network.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in other.stage.network.state_dict().items())
    with pytest.raises(ConfigError, match="have rank 4 and alpha 4, the task asks for task.rank=8 task.alpha=4"):
        make(rank=8).load_export(tmp_path / "export")
    with pytest.raises(ConfigError, match="are not those of the adapted modules"):
        make(module_filters=["to_q"]).load_export(tmp_path / "export")
    with pytest.raises(ConfigError, match="from=.*nothing: no such file or folder; give a run"):
        task.load_export(tmp_path / "nothing")


def with_values(task: Any) -> Any:
    """Return the task with everything that trains far from where it began."""
    for phase in task.phases():
        for index, parameter in enumerate(trainable(phase).values()):
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(index))
    return task


def predictions(task: Any) -> tuple[torch.Tensor, torch.Tensor]:
    noised = torch.randn(1, 16, 3, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return task.predictor(["a red [fernando]"], None)(noised, torch.tensor([0.4]))


FULL = {"train_tokens": TOKENS, "text_encoder_filters": [".self_attn"], "dora": True}


@pytest.mark.parametrize("model", ["c_tiny", "sd_tiny", "sdxl_tiny"])
@pytest.mark.parametrize("options", [{"kind": "lokr", "factor": 4}, {"kind": "loha"}])
def test_other_kinds_left_behind_predict_the_same_and_are_trained_on(
    options: dict[str, Any], model: str, tmp_path: Path
) -> None:
    filters = {"module_filters": None, "text_encoder_filters": [".self_attn"]}
    objective = component("objective", "gdf" if model == "c_tiny" else "ddpm")
    task = with_values(attached(component("task", "lora", rank=2, **options, **filters), model, objective))
    folder = left(task, "lora", tmp_path / "export")
    assert not (folder / "pytorch_lora_weights.safetensors").exists(), "no pipeline of diffusers loads it"
    again = component("task", "lora", rank=2, seed=9, weights=str(tmp_path), **options, **filters)
    again = attached(again, model, objective)
    for name, module in task.phases()[0].modules.items():
        found = again.phases()[0].modules[name].state_dict()
        assert all(torch.equal(found[key], value) for key, value in module.state_dict().items()), name
    if model != "c_tiny":
        network, family = task.stage.network, task.stage.family
        lora = read_lora(str(folder), key="from", family=family, modules=module_shapes(network))
        assert export_lora(lora, network, tmp_path / "a.safetensors", format="kohya") < 1e-6
        towers = {"sd_tiny": {"te"}, "sdxl_tiny": {"te1", "te2"}}[model]
        assert {name.split("_")[1] for name in load_file(tmp_path / "a.safetensors")} == {"unet"} | towers


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A task whose adapters of both modules and whose tokens have values, and what it left."""
    task, folder = with_values(make(**FULL)), tmp_path_factory.mktemp("run")
    left(task, "lora", folder / "export")
    return task, folder


def test_tokens_and_adapters_of_both_modules_train_and_the_caption_reaches_them() -> None:
    task = make(**FULL)
    (phase,) = task.phases()
    assert list(phase.modules) == ["network", "text_encoder"]
    shift = "text_encoder.text_model.embeddings.token_embedding.shift"
    assert shift in trainable(phase)
    batch = make_batch(0, 1, captions=("a [fernando]", "a circle"))
    prepared = task.prepare_batch(batch)
    prepared.drop_caption_B.zero_()
    task.loss(prepared).loss_B.mean().backward()
    used, unused = trainable(phase)[shift].grad
    assert used.abs().sum() > 0
    assert unused.abs().sum() == 0


def test_a_generation_finds_tokens_and_adapters_by_name(left_behind: tuple[Any, Path]) -> None:
    task, folder = left_behind
    fresh = make(**FULL)
    assert not torch.allclose(predictions(fresh)[0], predictions(task)[0], atol=1e-3)
    fresh.load_export(folder / "export")
    for found, expected in zip(predictions(fresh), predictions(task), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["", "export", "export/lora", "export/lora/adapter_model.safetensors"])
def test_a_new_run_starts_from_given_adapters_and_trains_their_tokens_on(
    left_behind: tuple[Any, Path], place: str
) -> None:
    task, folder = left_behind
    options = FULL | {"train_tokens": [["[new]", "^ring</w>"]]}
    fresh = make(**options, weights=str(folder / place))
    torch.testing.assert_close(predictions(fresh)[0], predictions(task)[0], rtol=1e-5, atol=1e-6)
    (phase,) = fresh.phases()
    table = phase.modules["text_encoder"].get_input_embeddings()
    assert table.names == ("[new]", "[fernando]", "red</w>")
    assert table.shift.requires_grad


def losses(task: Any, *captions: str) -> Any:
    """Return the prepared batch of samples with these captions, none dropped, and its losses."""
    prepared = task.prepare_batch(make_batch(*range(len(captions)), captions=captions))
    prepared.drop_caption_B.zero_()
    return prepared, task.loss(prepared)


@pytest.mark.parametrize(
    "options", [{}, {"text_encoder_filters": [".self_attn"], "dora": True}, {"kind": "lokr"}, {"kind": "loha"}]
)
def test_what_the_base_predicts_under_other_words_is_preserved(options: dict[str, Any]) -> None:
    """The loss is the objective's of both predictions, and 0 for a caption without the words."""
    task = with_values(make(preserve=[["star", "ring"], ["red", "blue"]], preserve_weight=3.0, **options))
    before = {name: p.requires_grad for name, p in task.stage.network.named_parameters()}
    prepared, output = losses(task, "a red star", "a circle")
    plain, alone = losses(with_values(make(**options)), "a red star", "a circle")
    preserved_B = output.report["loss_preserve"]
    assert torch.equal(output.loss_B.detach(), (alone.loss_B + preserved_B).detach())
    assert torch.equal(output.report["loss_raw"], alone.report["loss_raw"])
    assert plain.other_tokens is None

    others = task.prepare_batch(make_batch(0, 1, captions=("a blue ring", "a circle"))).tokens
    assert all(torch.equal(others[name], each) for name, each in prepared.other_tokens.items())
    noise = (prepared.noise_BCHW, prepared.timestep_B, prepared.offset_BC11)
    with torch.no_grad():
        diffused = task.objective.diffuse(task.stage.training_latents(prepared.images, prepared.drawn), *noise)
        made, of_base = (
            each._predict(
                diffused.noised, diffused.timestep_ratio_B, each._conditions(prepared, others, prepared.images), None
            )
            for each in (task, make(**options))  # fresh adapters add nothing
        )
    wanted_B = task.objective.loss(made, replace(diffused, target=of_base.float()), None)[0]
    assert wanted_B[0] > 0
    torch.testing.assert_close(preserved_B, 3.0 * wanted_B * torch.tensor([1.0, 0.0]))
    assert {name: p.requires_grad for name, p in task.stage.network.named_parameters()} == before


def test_nothing_is_preserved_where_the_caption_is_dropped() -> None:
    task = with_values(make(preserve=[["star", "ring"]], cond_drop_prob=0.5))
    prepared, _ = losses(task, "a red star", "a blue star")
    prepared.drop_caption_B[1] = True
    preserved_B = task.loss(prepared).report["loss_preserve"]
    assert preserved_B[0] > 0
    assert preserved_B[1] == 0


def test_the_preserved_words_change_what_the_adapters_learn_and_the_base_gets_no_gradient() -> None:
    grads = []
    for preserve in (None, [["star", "ring"]]):
        task = with_values(make(preserve=preserve))
        losses(task, "a star")[1].loss_B.mean().backward()
        grads.append([p.grad for p in trainable(task.phases()[0]).values()])
        frozen = [p for p in task.stage.network.parameters() if not p.requires_grad]
        assert all(p.grad is None for p in frozen)
    assert any(not torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_words_that_no_caption_has_are_reported_at_the_end() -> None:
    task = make(preserve=[["sks", "dog"]])
    assert losses(task, "a star")[1].report["loss_preserve"].eq(0).all()
    assert task.notices(last=False) == []
    assert task.notices(last=True) == ["no caption on rank 0 since this start had the words of task.preserve: sks"]
    losses(task, "a sks star")
    assert task.notices(last=True) == []


def test_new_tokens_that_no_caption_has_are_reported_at_the_end() -> None:
    task = make(train_tokens=[["[new]", "^ring</w>"], ["[other]", "^ring</w>"], ["^star", None]])
    losses(task, "a [New] star")
    assert task.notices(last=False) == []
    told = ["no caption on rank 0 since this start had the words of task.train_tokens: [other]"]
    assert task.notices(last=True) == told


def test_new_tokens_that_no_caption_has_are_reported_once_after_the_first_epoch() -> None:
    task = make(train_tokens=[["[new]", "^ring</w>"]])
    for epoch, count in ((0, 0), (0, 0), (1, 1), (1, 0), (2, 0)):
        task.prepare_batch(replace(make_batch(0, captions=("a star",)), epoch_B=torch.tensor([epoch])))
        assert len(task.notices()) == count


def test_a_cache_of_captions_cannot_be_preserved() -> None:
    task, stage = component("task", "lora", preserve=[["sks", "dog"]]), build_stage("c_tiny")
    stage.left_out = frozenset({"text_encoder"})
    with pytest.raises(ConfigError, match=r"task\.preserve: the cache holds .* make the cache with captions=false"):
        task.attach(stage, component("objective", "gdf"), torch.device("cpu"))


def test_adapters_of_the_text_encoder_need_their_filters(left_behind: tuple[Any, Path]) -> None:
    with pytest.raises(ConfigError, match="task.weights=.*: holds adapters of the text encoder; set"):
        make(dora=True, weights=str(left_behind[1]))


def test_a_filter_of_the_text_encoder_names_its_own_key() -> None:
    with pytest.raises(ConfigError, match="task.text_encoder_filters: '.atn' selects no linear"):
        make(text_encoder_filters=[".atn"])


def test_ranks_of_modules_are_counted_and_come_back(tmp_path: Path) -> None:
    options = {"ranks": [["up_blocks", 1, 2.0], [r"attn\.in_proj", 8]]}
    task = with_values(make(**options))
    layers = dict(adapted_layers(task.stage.network))
    ranks = [1 if name.startswith("up_") else 4 if "to_out" in name else 8 for name in layers]
    assert [layer.r["default"] for layer in layers.values()] == ranks
    widths = (layer.lora_A["default"].in_features + layer.lora_B["default"].out_features for layer in layers.values())
    numbers = sum(rank * width for rank, width in zip(ranks, widths, strict=True))
    assert sum(p.numel() for p in trainable(task.phases()[0]).values()) == numbers
    assert "of rank 1 to 8" in task.summary()
    left(task, "lora", tmp_path / "export")
    again = make(**options, seed=7, weights=str(tmp_path))
    assert torch.equal(predictions(again)[0], predictions(task)[0])
    with pytest.raises(ConfigError, match="have rank 8 and alpha 8, the task asks for task.rank=4 task.alpha=4"):
        make(weights=str(tmp_path))  # filled up to the largest rank
    filled = make(weights=str(tmp_path), rank=8, alpha=8.0)
    torch.testing.assert_close(predictions(filled)[0], predictions(task)[0], rtol=1e-5, atol=1e-6)


def test_ranks_that_no_adapted_module_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.ranks: 'channelwise' is found in no name of the 32 modules that are"):
        make(ranks=[["attention", 8], ["channelwise", 2]])
    with pytest.raises(ConfigError, match=r"joint_qkv=true: task\.ranks gives .*to_q and to_v other ranks"):
        make(ranks=[["to_v", 8]], joint_qkv=True)
    assert make(ranks=[["to_[qkv]", 8]], joint_qkv=True)


def test_first_values_follow_the_seed() -> None:
    layers = [next(adapted_layers(make(seed=seed).stage.network))[1] for seed in (0, 0, 1)]
    down = [layer.lora_A["default"].weight for layer in layers]
    assert torch.equal(down[0], down[1])
    assert not torch.equal(down[0], down[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank=0 must be at least 1: an adapter needs"),
        ({"ranks": [["attention"]]}, r"ranks=\['attention'\]: give an expression and a rank of at least 1"),
        ({"ranks": ["attention", 16]}, r"ranks=attention: give an expression and a rank of at least 1, such as"),
        ({"ranks": [["(", 8]]}, r"ranks: '\(' is no regular expression"),
        ({"alpha": 0.0}, "alpha=0.0 must be greater than 0"),
        ({"kind": "lokr", "dora": True}, "dora=True: is for kind=lora, not for kind=lokr; leave it out"),
        ({"kind": "loha", "factor": 4}, "factor=4: is for kind=lokr, not for kind=loha; leave it out"),
        ({"kind": "lokr", "ranks": [["to_q", 8]]}, "is for kind=lora or kind=loha, not for kind=lokr; leave it out"),
        ({"kind": "lokr", "factor": 0}, "factor=0 must be at least 1: it is the size of a matrix"),
        ({"dropout": 1.0}, "dropout=1.0: is a probability on the adapters' input"),
        ({"train_tokens": []}, r"train_tokens=\[\]: names no token; give pairs like"),
        ({"preserve": []}, r"preserve=\[\]: give pairs of words"),
        ({"preserve_weight": 0.0}, "preserve_weight=0.0 must be greater than 0"),
    ],
)
def test_numbers_out_of_range_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(Exception, match=message):
        component("task", "lora", **change)
