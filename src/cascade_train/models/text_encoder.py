"""The frozen CLIP text tower and its tokenizer: captions to token ids, and these to text conditions.

Shape legend: B batch, P pieces of captions, L text tokens, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.files.hub import parse_source
from cascade_train.models.formats.export import quiet
from cascade_train.models.formats.weights_source import TOKENIZER_FILES, WeightsSpec
from cascade_train.models.frozen_part import ClipTower, local_folder
from cascade_train.options import File, Free, Positive, check_fields, check_least

Tokens = dict[str, Tensor]
"""What the tokenizer makes of captions: `input_ids` and `attention_mask`, (B, L) int64.

Where a cache holds captions, it is the stage's `caption_products` instead, (B, ...) each.
"""

PACKAGED_TOKENIZER = Path(__file__).parent / "tiny_tokenizer"
"""Made by scripts/write_tiny_tokenizer.py."""

LONG_PIECES = 3
"""Pieces of a long caption: 225 tokens where one piece has 75, as other trainers have it."""


@dataclass(kw_only=True, eq=False, repr=False)
class TextEncoder(ClipTower):
    """CLIP's text tower, frozen; by default as Stable Cascade uses it (core: 77 tokens, padded, mask passed).

    Args:
        projection_dim: width of the pooled text; null = a tower without projection, which has none.
        tokenizer: hub id (`owner/name[@revision]`) or local folder; null = the packaged one.
        tokenizer_subfolder: folder within `tokenizer`; null = its root.
        max_tokens: length to which captions are truncated and padded, start and end included.
        vocab_size: rows of the embedding table.
        long_captions: a caption is encoded in three pieces of `max_tokens` that follow each other, the pooled embedding
            being the first piece's; false = one piece, and what is longer is truncated. Always three, so that a sample
            does not depend on its neighbours.
        hidden_layer: whose output is the text, counted from the end: -1 = the last layer, -2 = the one before
            ("clip skip").
        final_norm: whether the tower's last layer norm is applied to it.
        mask_padding: whether padding is hidden from attention, as in the cascade.
        pad_token: what fills captions up; null = the tokenizer's own.
        train: whether task=finetune trains the tower's weights too, of stages that allow it.
        lr: learning rate of what trains in the tower; null = the optimizer's.
        stop_after: optimizer steps after which the tower stays as it is; below 1 = a share of `train.max_steps`; null =
            it trains to the end.

    Raises:
        ValueError: a size below one, heads that do not divide the width, a layer that there is not, or a learning rate
            or a stop that is not above 0.
    """

    key = "text_encoder"

    tokenizer: File[str | None]
    tokenizer_subfolder: str | None
    max_tokens: int
    vocab_size: int
    long_captions: bool
    hidden_layer: int = -1
    final_norm: bool = False
    mask_padding: bool = True
    pad_token: str | None = None
    train: bool = False
    lr: Free[Positive[float | None]] = None
    stop_after: Free[Positive[float | None]] = None

    def __post_init__(self) -> None:
        check_fields(self, f"{self.key}.")
        check_least(f"{self.key}.max_tokens", self.max_tokens, 3, "start, one token and end")
        if not -self.num_hidden_layers <= self.hidden_layer <= -1:
            raise ValueError(
                f"{self.key}.hidden_layer={self.hidden_layer}: is counted from the end, give -1 (the last layer) to "
                f"{-self.num_hidden_layers} (the first)"
            )
        if self.stop_after is not None and self.stop_after > 1 and self.stop_after % 1:
            raise ValueError(
                f"{self.key}.stop_after={self.stop_after}: give whole optimizer steps, or a share of them below 1"
            )
        super().__post_init__()
        self.tokenizer_source = self.tokenizer
        del self.tokenizer  # until `build` loads it
        self.pieces = LONG_PIECES if self.long_captions else 1
        self._captions = self._truncated = 0
        self._noticed = False
        self._state_PLD: Tensor | None = None  # of `hidden_layer`, while the tower runs

    def forget_weights(self) -> None:
        """Take values from a fixed seed and the packaged tokenizer, whatever was named."""
        super().forget_weights()
        self.tokenizer_source = self.tokenizer_subfolder = None

    def weight_specs(self) -> list[WeightsSpec]:
        """Return the files that `build` loads, those of the tokenizer last."""
        specs = super().weight_specs()
        if self.tokenizer_source is None:
            return specs
        tokenizer = WeightsSpec(
            key=f"model.{self.key}.tokenizer",
            source=self.tokenizer_source,
            part=self.tokenizer_subfolder,
            beside=TOKENIZER_FILES,
            weights=False,
        )
        return [*specs, tokenizer]

    def build(self, *, device: torch.device, dtype: torch.dtype) -> None:
        """Load the tokenizer and make the frozen tower; a ConfigError if they do not exist or do not fit each other."""
        from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection  # takes seconds

        self.tokenizer = self._load_tokenizer()
        special = {name: getattr(self.tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        sizes = {name: value for name, value in self.sizes.items() if value is not None}
        config = CLIPTextConfig(vocab_size=self.vocab_size, max_position_embeddings=self.max_tokens, **sizes, **special)
        has_projection = self.projection_dim is not None
        self._make(CLIPTextModelWithProjection if has_projection else CLIPTextModel, config, device, dtype)
        for key in ("vocab_size", "hidden_size", *(["projection_dim"] if has_projection else [])):
            if getattr(self.module.config, key) != getattr(self, key):
                raise ConfigError(
                    f"{self.key}.{key}={getattr(self, key)}: {self.weights} has {getattr(self.module.config, key)}; "
                    "set the sizes of the tower that the weights belong to"
                )
        # The pooled token is the first end of text; the legacy id 2 would pool at the highest id: an added token.
        self.tower.eos_token_id = self.module.config.eos_token_id = self.tokenizer.eos_token_id
        # transformers records hidden states by the name of a class, and FSDP2 gives a tower another class.
        self.tower.encoder.layers[self.hidden_layer].register_forward_hook(self._keep_state)
        self.module.register_forward_hook(self._add_text)

    def _keep_state(self, _layer: nn.Module, _inputs: object, output: Tensor) -> None:
        self._state_PLD = output

    def _add_text(self, _module: nn.Module, _inputs: object, output: Any) -> Any:
        """Add the text to the tower's output, here where the norm's weights are whole and FSDP2 sees results."""
        text_PLD, self._state_PLD = self._state_PLD, None
        if self.final_norm:
            is_last = self.hidden_layer == -1
            text_PLD = output.last_hidden_state if is_last else self.tower.final_layer_norm(text_PLD)
        output["hidden_states"] = (text_PLD,)  # as an item, which FSDP2 finds; of an attribute there may be none
        return output

    def unreached(self) -> list[str]:
        """Return the names of modules of the tower on which the result of `encode` does not depend."""
        if self.projection_dim is not None:
            return []  # the pooled text depends on all
        prefix = "text_model." if hasattr(self.module, "text_model") else ""
        behind = range(self.num_hidden_layers + 1 + self.hidden_layer, self.num_hidden_layers)
        norm = [] if self.final_norm else [f"{prefix}final_layer_norm"]
        return [*(f"{prefix}encoder.layers.{number}" for number in behind), *norm]

    def unfreeze(self) -> None:
        """Let every weight train on which the result of `encode` depends."""
        self.module.requires_grad_(requires_grad=True)
        for name in self.unreached():
            self.module.get_submodule(name).requires_grad_(requires_grad=False)

    def load(self, folder: str) -> None:
        """Load the values of a tower of this architecture from a folder of transformers."""
        with quiet():
            found = type(self.module).from_pretrained(folder).state_dict()
        self.module.load_state_dict(found, strict=True)

    @property
    def tower(self) -> Any:
        """The layers and embeddings of the module, without its projection."""
        return getattr(self.module, "text_model", self.module)

    def _load_tokenizer(self) -> Any:
        source = str(PACKAGED_TOKENIZER) if self.tokenizer_source is None else self.tokenizer_source
        folder, subfolder = source, ""
        try:
            if self.tokenizer_source is not None:
                folder, subfolder = local_folder(self.weight_specs()[-1])
            padding = {} if self.pad_token is None else {"pad_token": self.pad_token}
            tokenizer = clip_tokenizer(folder, subfolder=subfolder, **padding)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.key}.tokenizer={source}: is neither a local folder nor a hub id that can be reached; "
                f"null takes the packaged tokenizer ({error})"
            ) from error
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes one of what it does not find
            raise ConfigError(
                f"{self.key}.tokenizer={source}: there is no vocabulary; name the folder that holds vocab.json or "
                "tokenizer.json, or null for the packaged one"
            )
        packaged = self.tokenizer_source is None and self.weights is not None
        if len(tokenizer) > self.vocab_size or (packaged and len(tokenizer) != self.vocab_size):
            raise ConfigError(
                f"{self.key}.vocab_size={self.vocab_size}: does not fit the {len(tokenizer)} tokens of {source}; "
                f"set {self.key}.tokenizer to the one that belongs to {self.key}.weights"
            )
        return tokenizer

    def units(self) -> list[list[nn.Module]]:
        """Return the tower's layers, each a unit of sharding, in execution order."""
        return [[layer] for layer in self.tower.encoder.layers]

    def tokenize(self, captions: Sequence[str]) -> Tokens:
        """Turn captions into `input_ids` and `attention_mask`, (B, pieces * `max_tokens`) int64 on the host."""
        room, tokenizer = self.max_tokens - 2, self.tokenizer
        words = token_ids(tokenizer, captions)
        self._captions += len(words)
        self._truncated += sum(len(ids) > room * self.pieces for ids in words)
        pieces = [ids[room * k :][:room] for ids in words for k in range(self.pieces)]
        start, end, pad = (getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad"))
        ids_PL = torch.tensor([[start, *piece, end] + [pad] * (room - len(piece)) for piece in pieces])
        keep_PL = torch.tensor([[1] * (len(piece) + 2) + [0] * (room - len(piece)) for piece in pieces])
        tokens = {"input_ids": ids_PL, "attention_mask": keep_PL}
        return {name: value_PL.reshape(len(words), -1) for name, value_PL in tokens.items()}

    def notices(self, *, last: bool = False) -> list[str]:
        """Report how many captions were truncated: once, after the first, and at the `last` call, if any were."""
        if not self._truncated or (self._noticed and not last):
            return []
        self._noticed = True
        room = (self.max_tokens - 2) * self.pieces
        remedy = "" if self.pieces > 1 else "; model.text_encoder.long_captions=true takes three times as many"
        return [f"{self._truncated} of {self._captions} captions were longer than {room} tokens and were cut{remedy}."]

    def encode(self, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        """Encode (B, L) tokens to text (B, L, D) and pooled text (B, 1, D'), None without projection.

        Each piece of `max_tokens` is encoded by itself; the pooled text is the first one's. Never syncs: the mask is
        made here, since transformers would ask the device whether anything is padded.
        """
        batch = len(tokens["input_ids"])
        keep_PL = tokens["attention_mask"].reshape(-1, self.max_tokens)
        output = self.module(
            input_ids=tokens["input_ids"].reshape(-1, self.max_tokens),
            attention_mask=causal_mask(keep_PL if self.mask_padding else torch.ones_like(keep_PL)),
        )
        text_PLD = output.hidden_states[0]
        text_BLD = text_PLD.reshape(batch, -1, text_PLD.shape[-1])
        if self.projection_dim is None:
            return text_BLD, None
        return text_BLD, output.text_embeds.unflatten(0, (batch, -1))[:, :1]


class SecondTextEncoder(TextEncoder):
    """The second text tower of a model that has two; otherwise a `TextEncoder`."""

    key = "text_encoder_2"


def causal_mask(keep_BL: Tensor) -> Tensor:
    """Return (B, 1, L, L) bool, true where a query (row) may see a key: not later than itself and not padding."""
    length = keep_BL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=keep_BL.device).tril()
    return causal_LL & keep_BL.bool()[:, None, None, :]


def token_ids(tokenizer: Any, captions: Sequence[str]) -> list[list[int]]:
    """Return the ids of captions without start and end."""
    return tokenizer(list(captions), add_special_tokens=False, verbose=False)["input_ids"]


def tokenizer_of_length(encoder: Any) -> Any:
    """Return a copy of a tower's tokenizer that pads to `max_tokens`: pipelines have no other place for that length."""
    copied = copy.deepcopy(encoder.tokenizer)
    copied.model_max_length = encoder.max_tokens
    return copied


def save_vocabulary(tokenizer: Any, folder: Path) -> None:
    """Write `vocab.json` and `merges.txt` beside a saved tokenizer, for transformers below 5 and other programs."""
    tokenizer.backend_tokenizer.model.save(str(folder))


def clip_tokenizer(folder: str | Path, **options: Any) -> Any:
    """Return transformers' CLIP tokenizer from a folder."""
    from transformers import CLIPTokenizer  # heavy

    return CLIPTokenizer.from_pretrained(str(folder), **options)


@dataclass(frozen=True, kw_only=True)
class TokenCounter:
    """Counts the tokens of captions without a text tower; `name` describes the tokenizer."""

    name: str
    tokenizer: Any

    def __call__(self, captions: Sequence[str]) -> list[int]:
        """Return how many tokens each caption has, start and end included."""
        return [len(ids) + 2 for ids in token_ids(self.tokenizer, captions)] if captions else []


def token_counter(source: str | None, subfolder: str | None) -> TokenCounter:
    """Return a counter with a model's tokenizer where it is on this machine, else with the packaged one.

    `source` is a hub id or local folder, None = the packaged one; `subfolder` a folder within it.
    """
    name, folder = "the packaged tokenizer", PACKAGED_TOKENIZER
    if source is not None and (found := _vocabulary_folder(source, subfolder or "")) is not None:
        name, folder = f"the tokenizer of {source}", found
    elif source is not None:
        name += f", since that of {source} is not on this machine; it finds more tokens than CLIP's"
    return TokenCounter(name=name, tokenizer=clip_tokenizer(folder, local_files_only=True))


def _vocabulary_folder(source: str, subfolder: str) -> Path | None:
    """Return the folder with a vocabulary, here or in the hub's cache; of one without, transformers makes its own."""
    on_hub = parse_source(source)
    root = Path(source) if Path(source).is_dir() or on_hub is None else on_hub.folder()
    folder = None if root is None else root / subfolder
    names = ("tokenizer.json", "vocab.json")
    return folder if folder is not None and any((folder / name).is_file() for name in names) else None
