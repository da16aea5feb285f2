"""A frozen T5 tower over bytes, which needs no vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cascade_train.models.frozen_part import FrozenTower
from cascade_train.models.stage import Tokens


@dataclass(kw_only=True, eq=False, repr=False)
class T5Encoder(FrozenTower):
    """T5's encoder."""

    key = "text_encoder_3"

    max_tokens: int
    d_model: int
    num_layers: int
    num_heads: int

    def build(self, *, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

        self.tokenizer = ByT5Tokenizer()
        sizes = {"d_model": self.d_model, "num_layers": self.num_layers, "num_heads": self.num_heads}
        width = self.d_model // self.num_heads
        config = T5Config(vocab_size=384, d_kv=width, d_ff=2 * self.d_model, pad_token_id=0, eos_token_id=1, **sizes)
        self._make(T5EncoderModel, config, device, dtype)

    def tokenize(self, captions: Sequence[str]) -> Tokens:
        options = {"padding": "max_length", "max_length": self.max_tokens, "truncation": True, "return_tensors": "pt"}
        return dict(self.tokenizer(list(captions), **options))

    def encode(self, ids_BL: Tensor) -> Tensor:
        return self.module(ids_BL)[0]
