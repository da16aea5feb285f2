"""Base of the denoising stages of all families: a network under text towers and frozen parts."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from cascade_train.models.formats.weights import StoredValues
from cascade_train.models.formats.weights_source import WeightsSpec
from cascade_train.models.frozen_part import FrozenTower
from cascade_train.models.initialize import DrawnValues, Rule, Shares, torch_rule
from cascade_train.models.lora import MAGNITUDE, begin_magnitudes
from cascade_train.models.stage import Images, Stage, Tokens, product, to_device
from cascade_train.models.text_encoder import TextEncoder
from cascade_train.options import File


@dataclass(kw_only=True, eq=False, repr=False)
class DenoisingStage(Stage):
    """A stage whose network denoises latents of images under captions, both encoded by frozen parts.

    Args:
        text_encoder: frozen text tower.

    Attributes:
        frozen_parts: names of the parts beside the network.
        towers: parts in the dtype of frozen modules; the others stay fp32.
        widths: an option of the network, and the part and its attribute that it must equal.
        multiple_of: the part whose stride is `image_multiple`.
        encoded_by: the part that encodes images to latents.

    Raises:
        ValueError: an image size that does not divide, or parts whose widths do not fit the network.
    """

    frozen_parts: ClassVar[tuple[str, ...]]
    towers: ClassVar[tuple[str, ...]] = ("text_encoder", "image_encoder")
    widths: ClassVar[tuple[tuple[str, str, str], ...]]
    multiple_of: ClassVar[str]
    encoded_by: ClassVar[str]
    decoded_by: ClassVar[str]

    image_size: int
    precision: Literal["bf16", "fp32"]
    seed: int
    random_encoders: bool
    weights: File[str | None]
    text_encoder: TextEncoder

    def __post_init__(self) -> None:
        self.network_config = self.network
        del self.network  # until `build` makes it of the architecture
        self._values: DrawnValues | StoredValues
        self._frozen_dtype: torch.dtype
        self.image_multiple = self._image_multiple()
        self._parts = {name: part for name in self.frozen_parts if (part := getattr(self, name)) is not None}
        for part in self._parts.values():
            if isinstance(part, FrozenTower):
                part.family = self.family
        self._check()
        if self.random_encoders:
            for part in self._parts.values():
                part.forget_weights()

    def _image_multiple(self) -> int:
        return getattr(self, self.multiple_of).stride

    def text_encoders(self) -> dict[str, TextEncoder]:
        """Return the text towers, by their key below `model.`."""
        return {name: part for name, part in self._parts.items() if isinstance(part, TextEncoder)}

    def _check(self) -> None:
        for name, encoder in self.text_encoders().items():
            if encoder.train and not self.trains_text:
                raise ValueError(
                    f"model.{name}.train=true: the text tower of {self.name} stays as it is; for adapters in it, set "
                    "task.text_encoder_filters of task=lora"
                )
        self._check_image_size(f"the stride of model.{self.multiple_of}")
        for key, name, attribute in self.widths:
            found = self.network_config.arguments[key]
            if name in self._parts and found != getattr(self._parts[name], attribute):
                width = getattr(self._parts[name], attribute)
                raise ValueError(f"model.network.{key}={found}: must equal model.{name}.{attribute}={width}")

    def build(self, *, device: torch.device, network_dtype: torch.dtype, frozen_dtype: torch.dtype) -> None:
        """Make the parts on `device`, and the network on the meta device until `fill`."""
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
        makers: dict[str, Callable[[], None]] = {"network": partial(self._build_network, network_dtype)}
        for name, part in self._parts.items():
            trains = isinstance(part, TextEncoder) and part.train
            dtype = {"dtype": network_dtype if trains else self._frozen_dtype} if name in self.towers else {}
            makers[name] = partial(part.build, device=device, **dtype)
        return makers

    def tokenize(self, captions: Sequence[str]) -> Tokens:
        """Turn captions into token ids and attention mask, (B, L) int64 on the host; or find their products."""
        return self._tokens_of(captions) if self.caption_lookup is None else self.caption_lookup(captions)

    def _tokens_of(self, captions: Sequence[str]) -> Tokens:
        return self.text_encoder.tokenize(captions)

    @torch.no_grad()
    def make_caption_products(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the `caption_products` of captions, without gradient."""
        device = self.text_encoder.module.device
        made = self._encode_text({name: to_device(ids, device) for name, ids in self._tokens_of(captions).items()})
        return {name: made[name] for name in self.caption_products}

    def _encode_text(self, tokens: Tokens) -> dict[str, Tensor]:
        """Return the products of tokens, or the cached ones."""
        if self.caption_lookup is not None:
            return {name: tokens[name].to(self._frozen_dtype) for name in self.caption_products}
        return self._text_of(tokens)

    @abc.abstractmethod
    def _text_of(self, tokens: Tokens) -> dict[str, Tensor]:
        """Return the text towers' outputs, by the names of `caption_products`."""

    def weight_specs(self) -> list[WeightsSpec]:
        """Return the files of the network and of the frozen parts, except those that are left out."""
        parts = [part for name, part in self._parts.items() if name not in self.left_out]
        found = [spec for part in parts for spec in part.weight_specs()]
        if self.weights is None or "network" in self.left_out:
            return found
        return [WeightsSpec(key="model.weights", source=self.weights, part=self.part), *found]

    def _build_network(self, dtype: torch.dtype) -> None:
        """Make the network on the meta device, and `_values`, which `fill` writes into it."""
        self.network = self.network_config.build()
        nn.Module.to(self.network, dtype)  # diffusers' own `to` warns about modules to keep in fp32
        if self.weights is None:
            self._values = DrawnValues(self.network, self._rule(), seed=self.seed)
        else:
            self._values = StoredValues(self.network, self.weights, part=self.part)

    def _rule(self) -> Rule:
        """Return the initial values of a network without weights."""
        return torch_rule(self.network)

    def fill(self, shares: Shares) -> None:
        """Write the network's initial values, and the adapters' magnitudes, which depend on them."""
        own = {name.replace(".base_layer.", "."): share for name, share in shares.items() if MAGNITUDE not in name}
        self._values.fill(own)
        begin_magnitudes(self.network, self._values.fill, shares)

    def frozen_modules(self) -> dict[str, nn.Module]:
        """Return the modules of the frozen parts, by name, except those that are left out."""
        return {name: part.module for name, part in self._parts.items() if name not in self.left_out}

    def notices(self, *, last: bool = False) -> list[str]:
        """Report how many captions were truncated, see `TextEncoder.notices`."""
        return self.text_encoder.notices(last=last)

    def set_attention(self, name: str) -> None:
        """Choose the attention kernel of the network, see `block_network.set_attention`."""
        self.network.set_attention(name)

    @torch.no_grad()
    def make_image_products(self, image_BCHW: Tensor) -> dict[str, Tensor]:
        """Return the `image_products` of images, (B, ...) each."""
        return {name: getattr(self, part).encode(image_BCHW) for name, part in self.image_products.items()}

    def encode(self, images: Images) -> Tensor:
        """Encode images (B, 3, H, W) float in [0, 1] to latents x0 (B, C, ceil(H / stride), ...) fp32, or find them."""
        return product(images, self.latent_name, getattr(self, self.encoded_by).encode)

    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Decode latents to images, (B, 3, H', W') fp32 in [0, 1], without gradient; of Stage C, to previews."""
        return getattr(self, self.decoded_by).decode(latent_BCHW).clamp(0, 1)

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (C, H, W) of the latent of an image of `height` x `width` pixels."""
        encoder = getattr(self, self.encoded_by)
        return encoder.latent_channels, -(-height // encoder.stride), -(-width // encoder.stride)
