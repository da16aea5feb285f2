"""What Stage B and C share: a `CascadeUNet` under a text tower and a compressor.

Must not live here: what is modelled and what it is conditioned on (stage_b.py, stage_c.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cascade_train.models.cascade_unet import CascadeUNet
from cascade_train.models.cascade_unet_config import CascadeUNetConfig
from cascade_train.models.formats.weights import StoredValues
from cascade_train.models.initialize import DrawnValues, InitialValues, Shares, unet_rule
from cascade_train.models.lora import begin_magnitudes, split_magnitudes
from cascade_train.models.semantic_compressor import SemanticCompressor
from cascade_train.models.stage import Stage, Tokens
from cascade_train.models.text_encoder import TextEncoder

TOWERS = ("text_encoder", "image_encoder")
"""Parts that take the dtype of frozen modules; the others stay fp32, as in the original."""


class DenoisingStage(Stage):
    """A stage whose network is a `CascadeUNet`, with the original's initialisation where it has no weights.

    Args:
        network: architecture of the network.
        text_encoder: frozen text tower.
        semantic_compressor: images to semantic latents.

    Raises:
        ValueError: an image size that does not divide, or parts whose widths do not fit the network.
    """

    network: CascadeUNet
    _values: InitialValues
    _frozen_dtype: torch.dtype

    def __init__(
        self,
        parts: Mapping[str, Any],
        widths: Iterable[tuple[str, str, int]],
        *,
        image_size: int,
        precision: str,
        seed: int,
        random_encoders: bool,
        weights: str | None,
        network: CascadeUNetConfig,
        text_encoder: TextEncoder,
        semantic_compressor: SemanticCompressor,
    ) -> None:
        """Store and check; `widths` are (key of the network, key of another part, that part's width)."""
        self.image_size = image_size
        self.precision = precision
        self.seed = seed
        self.weights = weights
        self.network_config = network
        self.text_encoder = text_encoder
        self.semantic_compressor = semantic_compressor
        self.image_multiple = semantic_compressor.stride
        shared = {"text_encoder": text_encoder, "semantic_compressor": semantic_compressor}
        self._parts = {name: part for name, part in (shared | dict(parts)).items() if part is not None}
        self._check(widths)
        if random_encoders:
            for part in self._parts.values():
                part.forget_weights()

    def _check(self, widths: Iterable[tuple[str, str, int]]) -> None:
        if self.image_size < self.image_multiple or self.image_size % self.image_multiple:
            raise ValueError(
                f"model.image_size={self.image_size}: must be a multiple of {self.image_multiple} pixels, "
                "the stride of the semantic compressor"
            )
        for key, other, width in widths:
            if self.network_config.arguments[key] != width:
                raise ValueError(
                    f"model.network.{key}={self.network_config.arguments[key]}: must equal model.{other}={width}"
                )

    def build(self, *, device: torch.device, network_dtype: torch.dtype, frozen_dtype: torch.dtype) -> None:
        """Make the parts on `device`, and the network on the meta device, where it waits for `fill`."""
        self._frozen_dtype = frozen_dtype
        for name, make in self._makers(device, network_dtype).items():
            if name not in self.left_out:
                make()

    def complete(self) -> None:
        """Build on the host what `build` left out."""
        makers = self._makers(torch.device("cpu"), self._frozen_dtype)
        missing, self.left_out = self.left_out, frozenset()
        for name in missing:
            makers[name]()

    def _makers(self, device: torch.device, network_dtype: torch.dtype) -> dict[str, Callable[[], None]]:
        """Return what builds each part, by its name."""
        makers: dict[str, Callable[[], None]] = {"network": partial(self._build_network, network_dtype)}
        for name, part in self._parts.items():
            dtype = {"dtype": self._frozen_dtype} if name in TOWERS else {}
            makers[name] = partial(part.build, device=device, **dtype)
        return makers

    def tokenize(self, captions: Sequence[str]) -> Tokens:
        """Turn captions into token ids and attention mask, (B, L) int64 on the host; or find their products."""
        return self.text_encoder.tokenize(captions) if self.caption_lookup is None else self.caption_lookup(captions)

    @torch.no_grad()
    def make_caption_products(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return those of `clip_text` (B, L, D) and `clip_text_pooled` (B, 1, D) that the stage is conditioned on."""
        device = self.text_encoder.module.device
        made = self._encode_text({name: ids.to(device) for name, ids in self.text_encoder.tokenize(captions).items()})
        return {name: made[name] for name in self.caption_products}

    def _encode_text(self, tokens: Tokens) -> dict[str, Tensor]:
        """Return `clip_text` and `clip_text_pooled` of tokens, or what a cache holds of them."""
        if self.caption_lookup is not None:
            return {name: tokens[name].to(self._frozen_dtype) for name in self.caption_products}
        return dict(zip(("clip_text", "clip_text_pooled"), self.text_encoder.encode(tokens), strict=True))

    def _build_network(self, dtype: torch.dtype) -> None:
        """Make the network on the meta device, and find its initial values."""
        self.network = self.network_config.build()
        nn.Module.to(self.network, dtype)  # diffusers' own `to` warns about modules to keep in fp32, without any
        if self.weights is None:
            self._values = DrawnValues(self.network, unet_rule(self.network_config.residual_blocks), seed=self.seed)
        else:
            self._values = StoredValues(self.network, self.weights, part=self.part)

    def fill(self, shares: Shares) -> None:
        """Write the network's initial values, and then what adapters on it derive from them."""
        magnitudes, base = split_magnitudes(shares)
        self._values.fill({name.replace(".base_layer.", "."): share for name, share in base.items()})
        begin_magnitudes(self.network, self._values, magnitudes)

    def frozen_modules(self) -> dict[str, nn.Module]:
        """Return the modules of the frozen parts, by name, but for those that are left out."""
        return {name: part.module for name, part in self._parts.items() if name not in self.left_out}

    def notices(self, *, last: bool = False) -> list[str]:
        """Report how many captions were truncated, see `TextEncoder.notices`."""
        return self.text_encoder.notices(last=last)

    def units(self) -> list[list[nn.Module]]:
        """Return the network's (residual, timestep, attention) triples, in execution order."""
        return self.network.units()

    def set_attention(self, name: str) -> None:
        """Choose the attention kernel of the network, see `attention.set_attention`."""
        self.network.set_attention(name)

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Recompute the activations of each triple in backward instead of keeping them."""
        self.network.gradient_checkpointing = enabled
