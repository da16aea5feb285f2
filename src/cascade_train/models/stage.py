"""The contract of a stage.

A stage knows nothing about what trains (tasks/) or when (engine/). Another model family is one more subclass and YAML.

Shape legend: B batch, C channels, H W image or latent size, L text tokens, D width.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from cascade_train.batch import Batch
from cascade_train.errors import ConfigError
from cascade_train.models.control import Conditions, Control, ControlOptions
from cascade_train.models.family import Family
from cascade_train.models.formats.weights_source import WeightsSpec
from cascade_train.models.initialize import Shares
from cascade_train.models.text_encoder import TextEncoder, Tokens
from cascade_train.options import File

Products = Mapping[str, Tensor]
"""What a stage makes of images or captions alone, (B, ...) each, by name; a cache can replace those by them."""

Save = Callable[[Mapping[str, Tensor], Path], float]
"""Writes a whole state dict into a folder, reads it back, and returns the largest relative difference."""

Images = Tensor | Products
"""Images (B, 3, H, W) float in [0, 1], or their cached products."""


def product(images: Images, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the cached product of images, or what `make` makes of them."""
    return make(images) if isinstance(images, Tensor) else images[name]


def below(root: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of one root from the state dict of several, under its own names."""
    return {name.removeprefix(f"{root}."): value for name, value in state.items() if name.startswith(f"{root}.")}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device; to CUDA from pinned memory, so that the host does not wait."""
    if device.type == "cuda" and not tensor.is_cuda and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Stage(abc.ABC):
    """A stage of the cascade, or the model of another family. The constructor is cheap; `build` makes the modules.

    Args:
        image_size: side in pixels of the square training images; a multiple of the stage's stride.
        precision: number format of compute that the size is meant for, used where `train.precision` is auto.
        seed: of the network's initial values when `weights` is null.
        random_encoders: true = the frozen parts take values from a fixed seed and the packaged tokenizer, whatever
            their own `weights` say (nothing is downloaded).
        weights: of the network: hub id (`owner/name[@revision]:subfolder`), local diffusers folder, run, or single
            file; null = from scratch.

    Attributes:
        family: autoencoders of several families have none.
        name: its role in its family, such as "stage_c", for messages.
        abilities: see `Task.fits`: "denoising" of latents, "text_to_image" from captions alone, "control" by a control
            network, "reconstruction" from an image's own latents, which a stage with "semantic_latents" samples; of
            stages that are scored by pictures "vq_autoencoder", "kl_autoencoder" and "previewer".
        part: the network's folder in pipelines and exports.
        image_multiple: both sides of an image must be multiples of this many pixels.
        image_keep_prob: default share of training samples that keep their image condition.
        guidance_scale: default of `sample.guidance_scale`; None = no guidance.
        guidance_rescale: see `guide`.
        noise_unit: the network's input for the noise level, see `NoiseCondition.unit`; None = the objective's.
        needs_image: whether the network sees an image in evaluation and sampling too.
        denoises: whether the network denoises latents; else it has no conditions and no `predict`.
        latent_name: name of the clean latents among the products.
        image_products: products of an image without a random choice; name -> the part that makes it, below `model.`.
        caption_products: the same of a caption.
        why_not_cached: why there are no `image_products`, for messages.
        needed_facts: `picture_facts` that a cache must hold too; name -> what it is, and how to do without.
        encodes_nothing: parts that no product needs.
        trains_text: whether its text towers' own weights may train.
        decoded_by: the part that decodes latents; None = the network.
        left_out: parts that `build` skips; set before it.
        reads_cache: whether training reads a cache of products; set before `build`.
        caption_lookup: finds the products of captions in a cache, on the host; None = there is no such cache.
        network: exists after `build`, unless it is left out.
        text_encoder: of stages that see captions.
        scheduler: configuration, with `_class_name`, of diffusers' scheduler that samples as the objective does; set
            before exports; None = there is none.
    """

    family: ClassVar[Family] = None  # type: ignore[assignment]  # not asked of autoencoders
    name: ClassVar[str]
    abilities: ClassVar[frozenset[str]] = frozenset()
    part: ClassVar[str]
    image_keep_prob: ClassVar[float]
    guidance_scale: ClassVar[float | None] = None
    guidance_rescale: ClassVar[float] = 0.7
    noise_unit: ClassVar[str | None] = None
    needs_image: ClassVar[bool]
    denoises: ClassVar[bool] = True
    latent_name: ClassVar[str]
    image_products: Mapping[str, str] = MappingProxyType({})
    caption_products: Mapping[str, str] = MappingProxyType({})
    why_not_cached: str = "it makes nothing of a picture alone"
    needed_facts: Mapping[str, str] = MappingProxyType({})
    encodes_nothing: ClassVar[frozenset[str]] = frozenset({"network"})
    trains_text: ClassVar[bool] = False
    decoded_by: ClassVar[str | None] = None
    left_out: frozenset[str] = frozenset()
    reads_cache: bool = False
    caption_lookup: Callable[[Sequence[str]], Tokens] | None = None
    image_size: int
    precision: str
    image_multiple: int
    weights: str | None
    seed: int
    network: Any
    text_encoder: TextEncoder
    scheduler: Mapping[str, Any] | None = None

    def _check_image_size(self, meaning: str) -> None:
        """Refuse an image size that is no multiple of `image_multiple`, of which `meaning` says what it is."""
        size, multiple = self.image_size, self.image_multiple
        if size < multiple or size % multiple:
            raise ConfigError(f"model.image_size={size}: must be a multiple of {multiple} pixels, {meaning}")

    @abc.abstractmethod
    def build(self, *, device: torch.device, network_dtype: torch.dtype, frozen_dtype: torch.dtype) -> None:
        """Make every module on the meta device, then load or initialise it on `device`.

        A stage may leave its network on the meta device, so that it is sharded before it has memory; `fill` follows.
        The network is fp32 where it trains (master weights), else of the frozen dtype, as text and image towers are. A
        ConfigError for weights that do not exist or belong to another model.
        """

    def fill(self, shares: Shares) -> None:
        """Write the initial values of a network that `build` left on the meta device; none by default.

        `shares` is undefined memory of this rank, by the network's names after the task's changes.
        """
        if shares:
            raise AssertionError(f"{self.name} has no values for {', '.join(list(shares)[:3])}")

    def frozen_modules(self) -> dict[str, nn.Module]:
        """Return the modules that never train, by name, in eval mode and without gradients; none by default."""
        return {}

    def tokenize(self, captions: Sequence[str]) -> Tokens:
        """Turn captions into token ids and attention mask, (B, L) int64 on the host; by default nothing. May sync."""
        return {}

    def text_encoders(self) -> dict[str, TextEncoder]:
        """Return the text towers by their key below `model.`; none by default."""
        return {}

    def notices(self, *, last: bool = False) -> list[str]:
        """Return what to log about the captions, see `Task.notices`; nothing by default."""
        return []

    def complete(self) -> None:
        """Build on the host what `build` left out, for an export that holds it; nothing by default."""

    def make_image_products(self, image_BCHW: Tensor) -> dict[str, Tensor]:
        """Return `image_products` of images (B, 3, H, W) float in [0, 1], without gradient."""
        return {}

    def picture_facts(self, batch: Batch) -> dict[str, Tensor]:
        """Return what `draw` takes of a batch's pictures beside them, (B, ...) on the host, for a cache to hold."""
        return {}

    def make_caption_products(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return `caption_products` of captions, without gradient."""
        return {}

    @abc.abstractmethod
    def encode(self, images: Images) -> Tensor:
        """Encode images, (B, 3, H, W) float in [0, 1] or cached, to clean latents x0, fp32. No gradient, no sync."""

    def draw(self, batch: Batch) -> Any:
        """Draw the stage's own random choices about a training batch; None = it has none."""
        return None

    def training_latents(self, images: Images, drawn: Any) -> Tensor:
        """Encode as `encode`, by the choices of `draw` where the latents depend on them."""
        return self.encode(images)

    def conditions(
        self,
        tokens: Tokens,
        images: Images | None = None,
        keep_image_B: Tensor | None = None,
        drawn: Any = None,
    ) -> Conditions:
        """Encode the network's conditions, none by default. Must not sync.

        `tokens` are from `tokenize`, on the device; a dropped caption is the empty string's tokens. `images`, (B, 3, H,
        W) float in [0, 1] or cached, are a condition of the samples in `keep_image_B`, (B,) bool on the host, None =
        all; None = no image condition (zeros). `drawn` is from `draw`, in training alone.
        """
        return {}

    def check_control(self, options: ControlOptions) -> None:
        """Refuse options that mean nothing for this stage's control networks (ConfigError); called before `build`."""

    def add_control(self, options: ControlOptions, device: torch.device) -> Control:
        """Return a control network for the built stage on `device`; a ConfigError if one that is named does not fit."""
        raise AssertionError(f"{self.name} has no control networks, and was to be refused")

    @abc.abstractmethod
    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (C, H, W) of the latent of an image of `height` x `width` pixels."""

    @abc.abstractmethod
    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Decode latents to images for people, (B, 3, H', W') fp32 in [0, 1]. Without gradient."""

    def weight_specs(self) -> list[WeightsSpec]:
        """Return the files that `build` and `fill` load; none by default."""
        return []

    @classmethod
    def stored_pipeline(cls, folder: Path, model: str) -> tuple[list[str], dict[str, Any]]:
        """Return overrides, and values by dotted key, that compose a training of a whole pipeline's folder.

        `model` is the value of `Family.pipelines` for its class. A ConfigError for a part or a configuration that is
        missing, or an architecture that is not supported.
        """
        raise AssertionError(f"no pipeline of {cls.__name__} is read whole")

    def exports(self) -> Mapping[str, Save]:
        """Return the writers of the network for other programs, by the export's name; none by default.

        Where text towers train, the state dict has a root for the network and for each of them.
        """
        return {}

    def units(self) -> list[list[nn.Module]]:
        """Return the network's groups of modules that shard, recompute and compile together, in execution order."""
        return self.network.units()

    def set_attention(self, name: str) -> None:
        """Choose the attention kernel of the network: "sdpa", "xformers" or "math"; a ConfigError if it is missing."""

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Recompute the activations of each unit in backward instead of keeping them."""
        self.network.gradient_checkpointing = enabled

    def predict(
        self,
        noised_BCHW: Tensor,
        timestep_ratio_B: Tensor,
        cond: Conditions,
        control: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run the network on noised latents (B, C, H, W) at (B,) fp32 timestep ratios; same shape out."""
        return self.network(noised_BCHW, timestep_ratio_B, **cond, control=control, return_dict=False)[0]


@dataclass(kw_only=True, eq=False)
class AutoencoderStage(Stage):
    """Base of the stages that are autoencoders.

    Args:
        random_encoders: there are none beside the network; here so that `debug=random_weights` fits every model.
    """

    denoises = False
    image_keep_prob = 0.0
    needs_image = True
    why_not_cached = "its encoder trains"

    image_size: int
    precision: Literal["bf16", "fp32"]
    seed: int
    random_encoders: bool
    weights: File[str | None]
    latent_channels: int

    def weight_specs(self) -> list[WeightsSpec]:
        """Return the files of the network."""
        source = self.weights
        return [] if source is None else [WeightsSpec(key="model.weights", source=source, part=self.part)]

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (C, H, W) of the latent of an image of `height` x `width` pixels."""
        return self.latent_channels, height // self.image_multiple, width // self.image_multiple
