"""Named rows of the embedding table train, new tokens among them, and come back under their names."""

from __future__ import annotations

import logging

import pytest
import torch

from cascade_train.errors import ConfigError
from cascade_train.models.text_encoder import TextEncoder
from cascade_train.models.tokens import TokenTable, put_tokens, train_tokens, trained_tokens
from tests.unit.models.test_text_encoder import built

Entries = list[list[str | None]]


@pytest.fixture
def encoder() -> TextEncoder:
    return built()


def row(encoder: TextEncoder, key: str) -> torch.Tensor:
    return encoder.module.get_input_embeddings().weight[encoder.tokenizer.get_vocab()[key]]


def hidden(encoder: TextEncoder, caption: str) -> torch.Tensor:
    return encoder.encode(encoder.tokenize([caption]))[0]


def moved(table: TokenTable) -> TokenTable:
    torch.nn.init.normal_(table.shift, std=0.5, generator=torch.Generator().manual_seed(0))
    return table


def test_a_new_token_begins_as_the_mean_of_what_its_expression_matches(encoder: TextEncoder) -> None:
    circle, ring = row(encoder, "circle</w>"), row(encoder, "ring</w>")
    table = train_tokens(encoder, [["[star]", "^circle</w>"], ["<v>", "^(circle|ring)</w>"]])
    assert table.names == ("[star]", "<v>")
    assert table.ids == (671, 672)
    assert table.is_new == (True, True)
    torch.testing.assert_close(table.start, torch.stack([circle, (circle + ring) / 2]))
    ids = encoder.tokenize(["a [star] and <v>"])["input_ids"][0].tolist()
    assert ids[2] == 671
    assert 672 in ids
    torch.testing.assert_close(hidden(encoder, "a [star]"), hidden(encoder, "a circle"))


def test_existing_tokens_train_by_expression_each_once(encoder: TextEncoder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = hidden(encoder, "a red circle")
    table = train_tokens(encoder, [["^r(ed|ing)</w>", None], ["^red</w>", None]])
    vocabulary = encoder.tokenizer.get_vocab()
    assert set(table.names) == {"red</w>", "ring</w>"}
    assert [vocabulary[name] for name in table.names] == list(table.ids) == sorted(table.ids)
    assert len(encoder.tokenizer) == 671
    assert torch.equal(hidden(encoder, "a red circle"), before)
    assert "trains 2 tokens of the vocabulary" in caplog.text


def test_only_named_rows_get_gradients_and_other_captions_stay(encoder: TextEncoder) -> None:
    plain = built()
    table = moved(train_tokens(encoder, [["[star]", "^star</w>"], ["^red</w>", None]]))
    trainable = [name for name, p in encoder.module.named_parameters() if p.requires_grad]
    assert trainable == ["text_model.embeddings.token_embedding.shift"]
    assert torch.equal(hidden(encoder, "a blue circle"), hidden(plain, "a blue circle"))
    assert not torch.allclose(hidden(encoder, "a red circle"), hidden(plain, "a red circle"), atol=1e-2)
    hidden(encoder, "a [star] circle").square().mean().backward()
    assert table.shift.grad is not None
    assert table.shift.grad[0].abs().sum() > 0
    assert torch.equal(table.shift.grad[1], torch.zeros(128))


def test_a_bf16_tower_keeps_fp32_rows() -> None:
    encoder = built()
    encoder.module.bfloat16()
    table = train_tokens(encoder, [["[star]", "^star</w>"]])
    assert table.shift.dtype == table.start.dtype == torch.float32
    output = hidden(encoder, "a [star]")
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert table.shift.grad.dtype == torch.float32


def test_stored_rows_come_back_by_name_whatever_their_ids(encoder: TextEncoder) -> None:
    table = moved(train_tokens(encoder, [["[a]", "^star</w>"], ["[b]", "^ring</w>"], ["^red</w>", None]]))
    stored = table.stored()
    torch.testing.assert_close(stored.rows, table.start + table.shift)

    fresh = built()
    found = put_tokens(fresh, stored, origin="from=x")
    assert found.names == table.names
    assert found.is_new == (True, True, False)
    assert torch.equal(hidden(fresh, "a [a] [b] red"), hidden(encoder, "a [a] [b] red"))

    other = built()
    own = train_tokens(other, [["[c]", "^star</w>"], ["[b]", "^star</w>"]])
    merged = put_tokens(other, stored, origin="from=x")
    assert merged is trained_tokens(other)
    assert merged.names == ("[c]", "[b]", "[a]", "red</w>")
    assert merged.is_new == (True, True, True, False)
    torch.testing.assert_close(merged.start[0], own.start[0])
    torch.testing.assert_close(hidden(other, "a [a] [b] red"), hidden(encoder, "a [a] [b] red"))


def test_a_token_that_is_there_already_is_said_and_trains_on(
    encoder: TextEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    encoder.tokenizer.add_tokens(["[star]"])
    wide = torch.nn.Embedding(672, 128)
    encoder.module.set_input_embeddings(wide)
    table = train_tokens(encoder, [["[star]", "^ring</w>"]])
    assert "The token [star] is in the vocabulary already: its own row trains on" in caplog.text
    assert torch.equal(table.start[0], wide.weight[671])
    assert table.is_new == (False,)


def test_a_new_token_without_an_expression_begins_as_zeros_and_says_so(
    encoder: TextEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    table = train_tokens(encoder, [["<v>", None]])
    assert table.start.eq(0).all()
    assert "The new token <v> begins as zeros" in caplog.text


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([["[star]", "qqqq"]], r"'qqqq' matches none of the 671 tokens; keys are word pieces"),
        ([["qqqq", None]], r"'qqqq' matches none of the 671 tokens"),
        ([["[star]", "(dog"]], r"'\(dog' is no regular expression"),
        ([["[star]"]], r"\['\[star\]'\] is no pair; write \['\[name\]', '\^dog</w>'\]"),
        ([["[x]", "^circle</w>"], ["[x]", "^ring</w>"]], r"\[x\] is named twice; give each new token a name of its"),
        ([["[FERN]", None], ["[fern]", None]], r"captions with .* are read as .*, so it would not train"),
        ([[None, "^dog"]], r"\[None, '\^dog'\] is no pair"),
    ],
)
def test_entries_that_name_nothing_are_refused(encoder: TextEncoder, entries: Entries, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_tokens(encoder, entries)


@pytest.mark.timeout(20)
def test_an_expression_that_takes_for_ever_is_refused(encoder: TextEncoder) -> None:
    encoder.tokenizer.add_tokens(["a" * 60])
    encoder.module.resize_token_embeddings(len(encoder.tokenizer))
    with pytest.raises(ConfigError, match=r"is no regular expression to use \(regex timed out\)"):
        train_tokens(encoder, [[r"^(a|aa)+[^\w</>]", None]])


def test_rows_of_another_width_are_refused(encoder: TextEncoder) -> None:
    stored = train_tokens(built(hidden_size=64), [["[star]", "^star</w>"]]).stored()
    with pytest.raises(ConfigError, match="from=x: its tokens have 64 values each, this text encoder's have 128"):
        put_tokens(encoder, stored, origin="from=x")
