import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from cascade_train.assembly.build import build_node
from cascade_train.errors import ConfigError
from cascade_train.models.text_encoder import TextEncoder, token_counter
from tests.unit.models.stages import model_config

CPU = torch.device("cpu")
END = 670


def make(**changes: Any) -> TextEncoder:
    return build_node(model_config("c_tiny", {"text_encoder": changes}).text_encoder)


def built(**changes: Any) -> TextEncoder:
    encoder = make(**changes)
    encoder.build(device=CPU, dtype=torch.float32)
    return encoder


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return built()


@pytest.fixture(scope="module")
def folder(encoder: TextEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored tower of the tiny sizes, whose config has the legacy end-of-text id, and its tokenizer."""
    path = tmp_path_factory.mktemp("tower")
    config = CLIPTextConfig(**encoder.module.config.to_dict() | {"eos_token_id": 2})
    torch.manual_seed(0)
    CLIPTextModelWithProjection(config).save_pretrained(path / "text")
    encoder.tokenizer.save_pretrained(path / "words")
    return path


def test_captions_are_cut_and_padded_to_one_length(encoder: TextEncoder) -> None:
    tokens = encoder.tokenize(["", "red", "red " * 100])
    assert tokens["input_ids"].shape == tokens["attention_mask"].shape == (3, 24)
    assert tokens["attention_mask"].sum(dim=1).tolist() == [2, 3, 24]
    assert tokens["input_ids"][:, 0].tolist() == [669] * 3
    assert tokens["input_ids"][2, -1] == END


def test_text_is_the_librarys_last_layer_before_the_final_norm(encoder: TextEncoder) -> None:
    tokens = encoder.tokenize(["a small red circle", ""])
    expected = encoder.module(**tokens, output_hidden_states=True)
    text, pooled = encoder.encode(tokens)
    assert text.shape == (2, 24, 128)
    assert pooled.shape == (2, 1, 128)
    torch.testing.assert_close(text, expected.hidden_states[-1])
    torch.testing.assert_close(pooled[:, 0], expected.text_embeds)


def test_tokens_after_the_end_do_not_change_the_pooled_embedding(encoder: TextEncoder) -> None:
    tokens = encoder.tokenize(["a red circle"])
    changed = tokens | {"input_ids": tokens["input_ids"].clone()}
    changed["input_ids"][0, -3:] = 5
    assert torch.equal(encoder.encode(tokens)[1], encoder.encode(changed)[1])


def test_stored_weights_and_tokenizer_are_loaded(folder: Path) -> None:
    loaded = built(weights=str(folder), subfolder="text", tokenizer=str(folder), tokenizer_subfolder="words")
    stored = CLIPTextModelWithProjection.from_pretrained(folder / "text")
    for name, value in stored.state_dict().items():
        assert torch.equal(value, loaded.module.state_dict()[name])
    assert not loaded.module.training
    assert not any(p.requires_grad for p in loaded.module.parameters())


def test_a_tower_of_integers_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "text", tmp_path / "text")
    file = tmp_path / "text" / "model.safetensors"
    stored = load_file(file)
    name = "text_model.final_layer_norm.weight"
    save_file({**stored, name: stored[name].long()}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"model.text_encoder.weights=.*model.safetensors: {name} is stored as int64"):
        built(weights=str(tmp_path), subfolder="text")


def test_legacy_end_of_text_id_is_corrected(folder: Path) -> None:
    loaded = built(weights=str(folder), subfolder="text")
    assert CLIPTextConfig.from_pretrained(folder / "text").eos_token_id == 2
    assert loaded.module.config.eos_token_id == loaded.module.text_model.eos_token_id == END
    loaded.tokenizer.add_tokens("[new]")
    tokens = loaded.tokenize(["a [new] circle"])
    tokens["input_ids"].clamp_(max=END)
    text, pooled = loaded.encode(tokens)
    end = tokens["input_ids"][0].tolist().index(END)
    expected = loaded.module.text_projection(loaded.module.text_model.final_layer_norm(text[:, end]))
    torch.testing.assert_close(pooled[:, 0], expected)


def test_dtype_and_forgetting(folder: Path) -> None:
    encoder = make(weights=str(folder), subfolder="text", tokenizer=str(folder), tokenizer_subfolder="words")
    encoder.forget_weights()
    encoder.build(device=CPU, dtype=torch.bfloat16)
    assert {p.dtype for p in encoder.module.parameters()} == {torch.bfloat16}
    assert encoder.module.config.eos_token_id == END


def test_packaged_tokenizer_serves_a_larger_table() -> None:
    encoder = built(vocab_size=1000)
    assert encoder.module.get_input_embeddings().weight.shape[0] == 1000
    assert encoder.encode(encoder.tokenize(["a red circle"]))[0].isfinite().all()


def test_missing_sources_are_refused(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    with pytest.raises(ConfigError, match="null takes the packaged tokenizer"):
        built(tokenizer=gone)
    with pytest.raises(ConfigError, match=r"text_encoder\.weights=.*is neither .*; null takes seeded values"):
        built(weights=gone)


def test_tokens_are_counted_by_the_packaged_tokenizer_where_the_models_own_is_not_here() -> None:
    counter = token_counter("nobody/nothing", "tokenizer")
    assert "packaged tokenizer, since that of nobody/nothing is not on this machine" in counter.name
    assert counter(["a red circle"]) == token_counter(None, None)(["a red circle"])


def test_a_tower_and_a_tokenizer_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer"}')
    with pytest.raises(ConfigError, match="there is no vocabulary; name the folder that holds vocab.json"):
        built(tokenizer=str(tmp_path))
    with pytest.raises(ConfigError, match="set the sizes of the tower that the weights belong to"):
        built(hidden_size=256, subfolder="text", weights=str(folder))
    with pytest.raises(ConfigError, match=r"text_encoder\.vocab_size=600: does not fit the 671 tokens"):
        built(vocab_size=600)
    with pytest.raises(ConfigError, match=r"set text_encoder\.tokenizer to the one that belongs"):
        built(weights=str(folder), subfolder="text", vocab_size=1000)


def test_cut_captions_are_reported_once_and_counted_at_the_end() -> None:
    encoder = built()
    assert encoder.notices(last=True) == []
    encoder.tokenize(["red " * 22, "red " * 23, ""])
    encoder.tokenize(["red " * 40])
    assert encoder.notices() == [
        "2 of 4 captions were longer than 22 tokens and were cut; "
        "model.text_encoder.long_captions=true takes three times as many."
    ]
    encoder.tokenize(["red " * 40])
    assert encoder.notices() == []
    assert encoder.notices(last=True)[0].startswith("3 of 5 captions were longer than 22 tokens")


def test_long_captions_are_encoded_in_three_pieces_and_pooled_by_the_first(encoder: TextEncoder) -> None:
    long = built(long_captions=True)
    words = ["red", "blue", "green"]
    captions = [" ".join(words[i % 3] for i in range(50)), "a small circle"]
    tokens = long.tokenize(captions)
    assert tokens["input_ids"].shape == tokens["attention_mask"].shape == (2, 72)
    assert tokens["attention_mask"].sum(dim=1).tolist() == [50 + 6, 3 + 6]
    text, pooled = long.encode(tokens)
    assert text.shape == (2, 72, 128)
    pieces = [" ".join(captions[0].split()[start : start + 22]) for start in (0, 22, 44)]
    alone, pooled_alone = encoder.encode(encoder.tokenize([*pieces, captions[1], "", ""]))
    torch.testing.assert_close(text, alone.reshape(2, 72, 128), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pooled, pooled_alone[[0, 3]].reshape(2, 1, 128), rtol=1e-4, atol=1e-5)
    assert long.notices() == []
    long.tokenize(["red " * 67])
    assert long.notices() == ["1 of 3 captions were longer than 66 tokens and were cut."]
