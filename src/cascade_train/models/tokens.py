"""Tokens whose rows of the text tower's embedding table train: new ones and existing ones.

A vocabulary's keys are raw byte-pair pieces: the word "dog" is `dog</w>`, `dog` is a piece within longer words.

Shape legend: B batch, L text tokens, D width, N trained tokens, V rows of the table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import regex
import torch
from torch import Tensor, nn
from torch.nn import functional

from cascade_train.errors import ConfigError
from cascade_train.models.lora import TrainedTokens
from cascade_train.models.text_encoder import TextEncoder, token_ids

log = logging.getLogger(__name__)


class TokenTable(nn.Module):
    """A frozen embedding table with the rows of some tokens replaced by `start + shift`, of which `shift` trains.

    So weight decay pulls a row to its initial value and changes no other row (Stable Cascade, modules/lora.py). Ids
    beyond the table are new tokens.

    Attributes:
        names: N keys of the vocabulary.
        ids: their N ids.
        is_new: whether each was added to the vocabulary.
        base: the frozen table, V rows.
        start: (N, D) fp32 buffer, part of the state.
        shift: (N, D) fp32 parameter, zero at first.
    """

    start: Tensor
    place: Tensor

    def __init__(self, base: nn.Embedding, tokens: TrainedTokens) -> None:
        super().__init__()
        device, ids = base.weight.device, tokens.ids
        self.names, self.ids, self.is_new = tokens.strings, tokens.ids, tokens.is_new
        self.base = base.requires_grad_(requires_grad=False)
        start_ND = tokens.rows.detach().to(device=device, dtype=torch.float32)
        self.register_buffer("start", start_ND.clone())
        self.shift = nn.Parameter(torch.zeros_like(start_ND))
        place = torch.full((max(base.num_embeddings, *(i + 1 for i in ids)),), -1, device=device)
        place[list(ids)] = torch.arange(len(ids), device=device)
        self.register_buffer("place", place, persistent=False)

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Look (B, L) ids up; (B, L, D) in the table's dtype. Does not sync."""
        place_BL = self.place[ids_BL]
        frozen_BLD = self.base(ids_BL.clamp(max=self.base.num_embeddings - 1))
        trained_BLD = functional.embedding(place_BL.clamp(min=0), self.start + self.shift)
        return torch.where(place_BL[..., None] >= 0, trained_BLD.to(frozen_BLD.dtype), frozen_BLD)

    def stored(self, state: Mapping[str, Tensor] | None = None) -> TrainedTokens:
        """Return the tokens with their rows as they are now, from a gathered `state` or else this whole module."""
        state = self.state_dict() if state is None else state
        rows_ND = (state["start"] + state["shift"]).float().cpu()
        return TrainedTokens(strings=self.names, ids=self.ids, is_new=self.is_new, rows=rows_ND)


def train_tokens(encoder: TextEncoder, entries: Sequence[Sequence[str | None]]) -> TokenTable:
    """Let the rows of the named tokens train, new tokens being added to the tokenizer, and return their table.

    The encoder is built, whole (not sharded), without trained tokens. `entries` are those of `task.train_tokens`; a new
    token without an expression is initialised with zeros. A ConfigError for an entry that is no pair, an expression
    that is invalid or matches nothing, or two new tokens that are one to the tokenizer.
    """
    table, old = encoder.module.get_input_embeddings(), set(encoder.tokenizer.get_vocab())
    chosen: dict[str, Tensor] = {}
    for entry in entries:
        if len(entry) != 2 or not isinstance(entry[0], str):
            raise ConfigError(
                f"task.train_tokens: {list(entry)} is no pair; write ['[name]', '^dog</w>'] for a new token, "
                "or ['^snail', null] for existing ones"
            )
        token, begin = entry
        if is_new(token) and token in chosen:
            raise ConfigError(f"task.train_tokens: {token} is named twice; give each new token a name of its own")
        rows = _new_rows(encoder, table, token, begin) if is_new(token) else _existing_rows(encoder, table, token)
        chosen |= {name: row for name, row in rows.items() if name not in chosen}
    new = {name for name in chosen if name not in old}
    _check_read(encoder, sorted(new))
    return _replace_table(encoder, table, chosen, new)


def _check_read(encoder: TextEncoder, new: Sequence[str]) -> None:
    """Raise a ConfigError for a new token that the tokenizer reads as another, since it ignores case."""
    for token in new:
        (ids,) = token_ids(encoder.tokenizer, [token])
        if (read := encoder.tokenizer.convert_ids_to_tokens(ids)) != [token]:
            raise ConfigError(
                f"task.train_tokens: captions with {token} are read as {' '.join(read)}, so it would not train; the"
                " tokenizer may ignore case: give it another name"
            )


def is_new(token: str) -> bool:
    """Return whether an entry of `train_tokens` names a new token, not a regular expression."""
    return token[:1] + token[-1:] in ("[]", "<>")


def _new_rows(encoder: TextEncoder, table: nn.Embedding, token: str, begin: str | None) -> dict[str, Tensor]:
    vocabulary = encoder.tokenizer.get_vocab()
    if token in vocabulary and vocabulary[token] < table.num_embeddings:
        log.warning("The token %s is in the vocabulary already: its own row trains on; %r is not used.", token, begin)
        return {token: table.weight[vocabulary[token]].float()}
    if begin is None:
        log.warning("The new token %s begins as zeros; a regular expression would give it a meaning.", token)
        row = torch.zeros(table.embedding_dim, device=table.weight.device)
    else:
        ids = [i for _, i in _match_tokens(vocabulary, begin, table.num_embeddings)]
        row = table.weight[ids].float().mean(dim=0)
        log.info("The new token %s begins as the mean of %d rows of the vocabulary.", token, len(ids))
    encoder.tokenizer.add_tokens([token])
    return {token: row}


def _existing_rows(encoder: TextEncoder, table: nn.Embedding, expression: str) -> dict[str, Tensor]:
    found = _match_tokens(encoder.tokenizer.get_vocab(), expression, table.num_embeddings)
    shown = ", ".join(name for name, _ in found[:8]) + (", ..." if len(found) > 8 else "")
    log.info("%r trains %d tokens of the vocabulary: %s.", expression, len(found), shown)
    return {name: table.weight[i].float() for name, i in found}


def _match_tokens(vocabulary: Mapping[str, int], expression: str, rows: int) -> list[tuple[str, int]]:
    """Return (key, id) of the tokens that have a row and match, by id."""
    try:
        pattern = regex.compile(expression)
        found = [(name, i) for name, i in vocabulary.items() if i < rows and pattern.search(name, timeout=1.0)]
    except (regex.error, TimeoutError) as error:
        raise ConfigError(f"task.train_tokens: {expression!r} is no regular expression to use ({error})") from error
    if not found:
        raise ConfigError(
            f"task.train_tokens: {expression!r} matches none of the {rows} tokens; keys are word pieces, "
            "the whole word dog is '^dog</w>', and '^dog' is all that begins with it"
        )
    return sorted(found, key=lambda item: item[1])


def put_tokens(encoder: TextEncoder, stored: TrainedTokens, *, origin: str) -> TokenTable:
    """Load stored rows into a whole encoder, adding tokens that are not there, and return their table.

    Tokens are found by name, since their ids depend on what else was added; other trained tokens keep their rows.
    `origin` is named by the ConfigError for rows of another width.
    """
    present = trained_tokens(encoder)
    base = encoder.module.get_input_embeddings() if present is None else present.base
    if stored.rows.shape[1] != base.embedding_dim:
        raise ConfigError(
            f"{origin}: its tokens have {stored.rows.shape[1]} values each, this text encoder's have "
            f"{base.embedding_dim}; choose the model= that they were trained on"
        )
    rows, new = {}, {name for name, is_new in zip(stored.strings, stored.is_new, strict=True) if is_new}
    if present is not None:
        rows = dict(zip(present.names, present.stored().rows, strict=True))
        new |= {name for name, is_new in zip(present.names, present.is_new, strict=True) if is_new}
    rows |= dict(zip(stored.strings, stored.rows.float(), strict=True))
    encoder.tokenizer.add_tokens([name for name in stored.strings if name not in encoder.tokenizer.get_vocab()])
    return _replace_table(encoder, base, rows, new)


def trained_tokens(encoder: TextEncoder) -> TokenTable | None:
    """Return the table with the tokens that train; None = none do."""
    table = encoder.module.get_input_embeddings()
    return table if isinstance(table, TokenTable) else None


def _replace_table(encoder: TextEncoder, base: nn.Embedding, rows: Mapping[str, Tensor], new: set[str]) -> TokenTable:
    vocabulary = encoder.tokenizer.get_vocab()
    tokens = TrainedTokens(
        strings=tuple(rows),
        ids=tuple(vocabulary[name] for name in rows),
        is_new=tuple(name in new for name in rows),
        rows=torch.stack(list(rows.values())),
    )
    table = TokenTable(base, tokens)
    encoder.module.set_input_embeddings(table)
    return table
