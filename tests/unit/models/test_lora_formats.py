"""Every format of adapters computes the same when read back, and foreign files mean what their programs mean."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.formats.lora_file_original import original_places, write_original
from cascade_train.models.cascade.networks.unet import CascadeUNet
from cascade_train.models.formats.export import build_plain_network, fixed_prediction
from cascade_train.models.formats.export_lora import export_lora
from cascade_train.models.formats.lora_files import (
    adapter_size,
    holds_lora,
    module_shapes,
    read_lora,
    refill_lora,
    write_diffusers_file,
    write_peft_folder,
)
from cascade_train.models.formats.lora_files_keyed import (
    token_files,
    with_one_rank,
    write_embeddings,
    write_token_files,
)
from cascade_train.models.lora import (
    TrainedTokens,
    inject_lora,
    lora_spec,
)
from tests.unit.models.small_networks import adapted, empty_network, load_lora, small_network, stored

predicted = partial(fixed_prediction, CASCADE)
read_from = partial(read_lora, key="from", family=CASCADE)


FERNANDO = TrainedTokens(strings=("[fernando]",), ids=(49408,), is_new=(True,), rows=torch.linspace(0, 1, 24)[None])
TOKENS = {"text_encoder": FERNANDO}
TEXT = {
    "text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 24),
    "text_model.encoder.layers.0.self_attn.q_proj.lora_B.weight": torch.ones(24, 2),
}


@pytest.fixture(scope="module")
def trained() -> CascadeUNet:
    return adapted(module_filters=[".attn", "embedding", "channelwise.0"])


def test_a_folder_keeps_trained_tokens(trained: CascadeUNet, tmp_path: Path) -> None:
    write_peft_folder(tmp_path, stored(trained, TEXT, tokens=TOKENS))
    found = read_from(str(tmp_path), modules=module_shapes(trained))
    tokens = found.tokens["text_encoder"]
    assert (tokens.strings, tokens.ids, tokens.is_new) == (("[fernando]",), (49408,), (True,))
    assert torch.equal(tokens.rows, FERNANDO.rows)
    assert found.by_root()["text_encoder"].keys() == TEXT.keys()


def test_tokens_get_files_of_their_own() -> None:
    assert token_files(["dog", "dog</w>", "[s*]", "[s+]", "***"]) == {
        "dog</w>": "dog.safetensors",
        "dog": "dog-2.safetensors",
        "[s*]": "s.safetensors",
        "[s+]": "s-2.safetensors",
        "***": "token.safetensors",
    }


def test_embeddings_of_other_adapters_do_not_stay(trained: CascadeUNet, tmp_path: Path) -> None:
    for tokens, left in ((FERNANDO, "fernando.safetensors"), (replace(FERNANDO, strings=("[b]",)), "b.safetensors")):
        lora = stored(trained, tokens={"text_encoder": tokens})
        export_lora(lora, trained, tmp_path / "a.safetensors", format="comfyui")
        assert [path.name for path in (tmp_path / "a.embeddings").glob("*.safetensors")] == [left]
    export_lora(stored(trained), trained, tmp_path / "a.safetensors", format="comfyui")
    assert not (tmp_path / "a.embeddings").exists()


def test_tokens_of_the_second_text_encoder_alone_are_written(trained: CascadeUNet, tmp_path: Path) -> None:
    lora = stored(trained, tokens={"text_encoder_2": FERNANDO})
    (tmp_path / "tokens").mkdir()
    write_token_files(tmp_path / "tokens", lora)
    write_embeddings(tmp_path / "embeddings", lora)
    assert [path.name for path in sorted(tmp_path.glob("*/*"))] == ["fernando.safetensors"] * 2


def test_adapters_of_a_text_encoder_alone_say_nothing_of_the_network(trained: CascadeUNet, tmp_path: Path) -> None:
    lora = replace(stored(trained, TEXT), state={f"text_encoder.{name}": value for name, value in TEXT.items()})
    write_diffusers_file(tmp_path, lora, "unet")
    with safe_open(tmp_path / "pytorch_lora_weights.safetensors", "pt") as file:
        assert "unet." not in str(file.metadata())


@pytest.mark.parametrize("name", ["a.embeddings", "embeddings"])
def test_tokens_beside_a_file_are_said_to_stay_unread(
    name: str, trained: CascadeUNet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).mkdir()
    write_token_files(tmp_path / name, stored(trained, tokens=TOKENS))
    save_file(dict(stored(trained).state), tmp_path / "a.safetensors")
    read_from(str(tmp_path / "a.safetensors"), modules=module_shapes(trained))
    assert caplog.text.count(f"tokens in {tmp_path / name} are not read; the run") == 1


def test_ranks_and_alphas_that_differ_stay_and_can_be_brought_together(tmp_path: Path) -> None:
    torch.manual_seed(0)
    a1, b1, a2, b2 = torch.randn(2, 24), torch.randn(32, 2), torch.randn(4, 32), torch.randn(128, 4)
    tensors = {
        "lora_unet_clip_txt_mapper.lora_down.weight": a1,
        "lora_unet_clip_txt_mapper.lora_up.weight": b1,
        "lora_unet_clip_txt_mapper.alpha": torch.tensor(1.0),
        "lora_unet_down_blocks_0_0_channelwise_0.lora_down.weight": a2,
        "lora_unet_down_blocks_0_0_channelwise_0.lora_up.weight": b2,
    }
    save_file(tensors, tmp_path / "lora.safetensors")
    lora = read_from(str(tmp_path / "lora.safetensors"), modules=module_shapes(empty_network()))
    assert [lora.spec.of(name) for name in lora.spec.targets] == [(2, 1.0), (4, 4.0)]
    one = with_one_rank(lora)
    assert [one.spec.of(name) for name in lora.spec.targets] == [(4, 4.0), (4, 4.0)]
    for each in (lora, one):
        first, second = (
            each.spec.of(name).scale * each.state[f"{name}.lora_B.weight"] @ each.state[f"{name}.lora_A.weight"]
            for name in lora.spec.targets
        )
        torch.testing.assert_close(first, 0.5 * b1 @ a1)
        torch.testing.assert_close(second, b2 @ a2)


RANKS = [["down_blocks.*to_q", 1], ["channelwise", 4, 6.0], [r"in_proj$", 3, 1.5]]
"""in_proj is the original's name of q, k and v."""


def test_the_first_expression_that_is_found_gives_rank_and_alpha(tmp_path: Path) -> None:
    spec = lora_spec(adapted(module_filters=[".attn", "embedding", "channelwise.0"], ranks=RANKS))
    assert spec.of("down_blocks.0.2.attention.to_q") == (1, 3.0)
    assert spec.of("up_blocks.0.2.attention.to_q") == spec.of("down_blocks.0.2.attention.to_k") == (3, 1.5)
    assert spec.of("down_blocks.0.0.channelwise.0") == (4, 6.0)
    assert spec.of("embedding.1") == spec.of("down_blocks.0.2.attention.to_out.0") == (2, 3.0)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
def test_a_folder_that_peft_wrote_scales_each_module_as_peft_does(options: dict[str, Any], tmp_path: Path) -> None:
    # peft, docs/source/package_reference/lora.md: keys of both patterns are endings of names, or regular expressions
    patterns = {"rank_pattern": {"to_q": 1, ".*up_blocks.*": 4}, "alpha_pattern": {"^embedding.1": 5, "to_[qk]": 0.3}}
    config = LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=["to_q", "to_k", "embedding.1"],
        init_lora_weights=False,
        **patterns,
        **options,
    )
    network = build_plain_network(CASCADE, small_network().config, small_network().state_dict()).eval()
    model = get_peft_model(network, config)
    model.save_pretrained(str(tmp_path))
    fresh = small_network()
    spec = load_lora(fresh, str(tmp_path))
    if not options:
        assert spec.of("up_blocks.0.2.attention.to_q") == (1, 0.3)
        assert spec.of("embedding.1") == (2, 5.0)
    torch.testing.assert_close(predicted(fresh), predicted(model.get_base_model()), atol=1e-5, rtol=1e-5)


def test_dotted_names_with_a_prefix_are_read(trained: CascadeUNet, tmp_path: Path) -> None:
    lora = stored(trained)
    theirs = {n.replace(".attention.to_out.0", ".attention.attn.out_proj"): v for n, v in lora.state.items()}
    save_file({f"diffusion_model.{name}": value for name, value in theirs.items()}, tmp_path / "lora.safetensors")
    found = read_from(str(tmp_path / "lora.safetensors"), modules=module_shapes(empty_network()))
    assert found.state.keys() == lora.state.keys()
    assert found.spec.alpha == found.spec.rank == 2


def test_embeddings_that_onetrainer_bundled_are_left_out(
    trained: CascadeUNet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lora = stored(trained)
    bundled = {"bundle_emb.[dog].clip_g": torch.ones(2, 1280), "bundle_emb.[cat].clip_g_out": torch.ones(1, 1280)}
    save_file({**lora.state, **bundled}, tmp_path / "a.safetensors")
    assert holds_lora(str(tmp_path / "a.safetensors"))
    assert adapter_size([CASCADE], str(tmp_path / "a.safetensors"), key="from") is None
    found = read_from(str(tmp_path / "a.safetensors"), modules=module_shapes(empty_network()))
    assert found.state.keys() == lora.state.keys()
    assert "OneTrainer bundled are not read: [cat], [dog]" in caplog.text


def test_the_original_layout_of_independent_projections_has_three_times_the_rank(tmp_path: Path) -> None:
    network = adapted()
    write_original(tmp_path / "lora.safetensors", stored(network, tokens=TOKENS), module_shapes(network), {})
    tensors = load_file(tmp_path / "lora.safetensors")
    assert tensors["weights.0.lora_down"].shape == (6, 32)  # out_proj comes first, filled up with zeros
    assert tensors["weights.1.lora_up"].shape == (96, 6)
    assert tensors["embeddings.indices"].tolist() == [49408]
    with safe_open(tmp_path / "lora.safetensors", framework="pt") as file:
        assert file.metadata()["rank"] == "6"
    found = read_from(str(tmp_path / "lora.safetensors"), modules=module_shapes(network))
    assert found.tokens["text_encoder"].strings == ("[fernando]",)
    # what was joint stays joint: written again, the rank does not grow
    write_original(tmp_path / "again.safetensors", found, module_shapes(network), {})
    again = load_file(tmp_path / "again.safetensors")
    assert again["weights.1.lora_up"].shape == (96, 6)
    torch.testing.assert_close(again, tensors)


def test_the_original_order_is_that_of_its_modules() -> None:
    names = [place.name for place in original_places(module_shapes(empty_network()), None)]
    mappers = ["clip_txt_mapper", "clip_txt_pooled_mapper", "clip_img_mapper"]
    assert names[:5] == [*mappers, "embedding.1", "down_blocks.0.0.depthwise"]
    attention = [place.name for place in original_places(module_shapes(empty_network()), [".attn"])]
    assert attention[:2] == ["down_blocks.0.2.attention.attn.out_proj", "down_blocks.0.2.attention.attn"]
    assert len(attention) == 12


def test_the_original_layout_refuses_what_it_has_no_place_for(tmp_path: Path, trained: CascadeUNet) -> None:
    lora = stored(trained)
    for changes, reason in (
        ({"spec": replace(lora.spec, dora=True)}, "weights that are decomposed"),
        ({"state": stored(trained, TEXT).state}, "adapters of the text encoder"),
        ({"tokens": {"text_encoder": replace(FERNANDO, is_new=(False,))}}, "tokens that the vocabulary held before"),
        ({"tokens": {"text_encoder": replace(FERNANDO, strings=("fernando",))}}, "new tokens without brackets"),
        ({"spec": replace(lora.spec, targets=("down_blocks.0.0.depthwise",))}, "convolutions that are larger"),
    ):
        with pytest.raises(ConfigError, match=f"the original's layout has no place for {reason}"):
            write_original(tmp_path / "lora.safetensors", replace(lora, **changes), module_shapes(trained), {})


def originals(network: CascadeUNet, filters: list[str] | None) -> dict[str, Tensor]:
    shapes = module_shapes(network)
    tensors = {}
    for index, place in enumerate(original_places(shapes, filters)):
        rows = sum(shapes[name][0] for name in place.ours)
        tensors[f"weights.{index}.lora_down"] = torch.ones(2, shapes[place.ours[0]][1])
        tensors[f"weights.{index}.lora_up"] = torch.ones(rows, 2)
    return tensors


def test_a_file_of_the_original_needs_its_filters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    network, path = empty_network(), tmp_path / "lora.safetensors"
    shapes = module_shapes(network)
    tensors = originals(network, ["channelwise.0"])
    save_file(tensors | {"embeddings.embeddings": torch.ones(1, 24)}, path)
    with pytest.raises(ConfigError, match=r'adapts 6 modules, but module_filters=\[".attn"\] selects 12 of this model'):
        read_from(str(path), modules=shapes)
    with caplog.at_level(logging.WARNING):
        assert len(read_from(str(path), modules=shapes, module_filters=["channelwise.0"]).spec.targets) == 6
    assert "its 1 trained tokens are left out" in caplog.text
    save_file(originals(network, None), path)
    with pytest.raises(ConfigError, match="adapts the depthwise layer down_blocks.0.0.depthwise, which has no"):
        read_from(str(path), modules=shapes, module_filters=None)
    save_file(originals(empty_network(block_out_channels=[64, 64]), [".attn"]), path)
    with pytest.raises(ConfigError, match=r"the adapter of down_blocks.0.2.attention.attn.out_proj is for 64 x 64"):
        read_from(str(path), modules=shapes)


@pytest.mark.parametrize(("width", "says"), [(2048, "Stage C 3.6B"), (1536, "Stage C 1B"), (1152, "Stage B 700M")])
def test_a_file_without_a_header_still_says_its_size(tmp_path: Path, width: int, says: str) -> None:
    tensors = {"weights.0.lora_down": torch.ones(1, width), "weights.0.lora_up": torch.ones(width, 1)}
    save_file(tensors, tmp_path / "lora.safetensors")
    with pytest.raises(ConfigError, match=f"the adapter belongs to {says}, but the network is of another size; use"):
        read_from(str(tmp_path / "lora.safetensors"), modules=module_shapes(empty_network()))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["clip_txt_mapper.lora_down.weight"], "lora_unet_clip_txt_mapper lacks half of its adapter"),
        (["mid.lora_down.weight", "mid.hada_w1_a"], "hada_w1_a is no part of a low-rank adapter"),
        (["mid.lora_down.weight", "mid.lora_up.weight"], "adapts lora_unet_mid, which this model has not"),
    ],
)
def test_broken_files_are_refused(names: list[str], message: str, tmp_path: Path) -> None:
    save_file({f"lora_unet_{name}": torch.ones(2, 2) for name in names}, tmp_path / "lora.safetensors")
    with pytest.raises(ConfigError, match=message):
        read_from(str(tmp_path / "lora.safetensors"), modules=module_shapes(empty_network()))


def test_a_run_starts_from_ranks_that_differ(tmp_path: Path) -> None:
    first, path = adapted(ranks=RANKS[:1]), tmp_path / "lora.safetensors"
    export_lora(stored(first), first, path, format="kohya")
    for options in ({"ranks": RANKS[:1], "rank": 2, "alpha": 3.0}, {"rank": 2, "alpha": 2.0}):  # the same, or filled up
        second = small_network()
        inject_lora(second, dropout=0.0, module_filters=[".attn"], seed=5, **options)
        refill_lora(second, str(path), key="task.weights")
        torch.testing.assert_close(predicted(second.eval()), predicted(first), atol=1e-5, rtol=1e-5)
    other = small_network()
    ranks = [["down_blocks.*to_q", 1], ["to_k", 4]]
    inject_lora(other, rank=2, alpha=3.0, dropout=0.0, module_filters=[".attn"], seed=5, ranks=ranks)
    says = "rank 2 and alpha 3, the task asks for rank 4 and alpha 3 in down_blocks.0.2.attention.to_k; set task.ranks"
    with pytest.raises(ConfigError, match=says):
        refill_lora(other, str(path), key="task.weights")


def test_a_joint_adapter_keeps_its_rank_in_the_original_layout(tmp_path: Path) -> None:
    network = adapted(joint_qkv=True)
    write_original(tmp_path / "lora.safetensors", stored(network), module_shapes(network), {})
    assert load_file(tmp_path / "lora.safetensors")["weights.1.lora_down"].shape == (2, 32)
    fresh = small_network()
    load_lora(fresh, str(tmp_path / "lora.safetensors"))
    torch.testing.assert_close(predicted(fresh), predicted(network), atol=1e-6, rtol=1e-6)
