"""Base of the training of autoencoders: pixels, features and, from a given step on, a discriminator.

Must not live here: losses of the latents (vqgan.py, autoencoder_kl.py).

Shape legend: B batch, C latent channels, H W image size, h w latent size.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cascade_train.models.image_quality import FeatureDistance
from cascade_train.models.networks.discriminator import PatchDiscriminator, build_discriminator
from cascade_train.models.stage import Stage
from cascade_train.options import File, check_within
from cascade_train.tasks.base import Export, Phase, StepOutput, weighted
from cascade_train.tasks.pictures import PictureObjective, PictureTask, PreparedPictures

MAX_WEIGHT = 1.0e6
MAX_STEP = 1_000_000_000_000


@dataclass(kw_only=True, eq=False)
class Perceptual:
    """A distance between features of pictures (Johnson et al. 2016), switched on by weights of VGG-16.

    Args:
        weights: a file of torchvision's VGG-16 (`vgg16-397923af.pth`, or as safetensors); null = off.
        weight: of this term beside the pixels'.
        start_step: first optimizer step in which it counts.
    """

    weights: File[str | None]
    weight: float
    start_step: int

    def __post_init__(self) -> None:
        check_within("perceptual.weight", self.weight, 0.0, MAX_WEIGHT)
        check_within("perceptual.start_step", self.start_step, 1, MAX_STEP)

    def build(self, device: torch.device) -> FeatureDistance | None:
        """Distance on `device`; None = off."""
        return None if self.weights is None else FeatureDistance(self.weights, device=device)


@dataclass(kw_only=True, eq=False)
class Adversarial:
    """A patch discriminator that trains beside the autoencoder (Esser et al. 2021, eq. 4 to 7).

    Args:
        start_step: optimizer step from which it trains and counts in the autoencoder's loss; null = never.
        weight: of this term beside the reconstruction's, after the adaptive weight.
        max_weight: largest adaptive weight.
        channels: width of the discriminator's first layer.
        layers: its strided layers.
        seed: of its first values.
    """

    start_step: int | None
    weight: float
    max_weight: float
    channels: int
    layers: int
    seed: int

    def __post_init__(self) -> None:
        if self.start_step is not None:
            check_within("adversarial.start_step", self.start_step, 1, MAX_STEP)
        check_within("adversarial.weight", self.weight, 0.0, MAX_WEIGHT)
        check_within("adversarial.max_weight", self.max_weight, 0.0, MAX_WEIGHT)
        check_within("adversarial.channels", self.channels, 1, 4096)
        check_within("adversarial.layers", self.layers, 1, 8)

    def build(self, device: torch.device) -> PatchDiscriminator | None:
        """Discriminator on `device`, fp32; None = off."""
        if self.start_step is None:
            return None
        return build_discriminator(channels=self.channels, layers=self.layers, seed=self.seed, device=device)


@dataclass(kw_only=True, eq=False)
class AutoencoderObjective(PictureObjective):
    """How reconstructions of an autoencoder are scored.

    Args:
        train_encoder: whether the encoder trains; false = latents stay as they are, and a better decoder serves what
            was trained on them.
        train_decoder: whether the decoder trains.
        perceptual: a distance between features.
        adversarial: a discriminator.
    """

    train_encoder: bool
    train_decoder: bool
    perceptual: Perceptual
    adversarial: Adversarial

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.train_encoder or self.train_decoder):
            raise ValueError("objective.train_encoder=false, objective.train_decoder=false: nothing would train")


class AutoencoderTask(PictureTask):
    """Trains encoder and decoder of a stage's network, or one of them."""

    trains_network = True
    rewritten: ClassVar[bool] = False
    """Whether `after_step` writes weights of the network."""
    objective: AutoencoderObjective

    def __init__(self, objective: AutoencoderObjective) -> None:
        self.objective = objective
        self._step = 1

    def attach(self, stage: Stage, objective: Any, device: torch.device) -> None:
        """Take the built stage, freeze the half that does not train, and build discriminator and features."""
        super().attach(stage, objective, device)
        network = self.stage.network
        network.requires_grad_(requires_grad=True)
        for module in network.encoder_modules():
            module.requires_grad_(self.objective.train_encoder)
        for module in network.decoder_modules():
            module.requires_grad_(self.objective.train_decoder)
        self.discriminator = self.objective.adversarial.build(device)
        self.features = self.objective.perceptual.build(device)

    def phases(self) -> list[Phase]:
        """Autoencoder's phase and, where there is one, the discriminator's."""
        phase = Phase(
            name="train",
            modules={"network": self.stage.network},
            units={"network": self.stage.units()},
            loss=self.loss,
            rewritten=self.rewritten,
        )
        if self.discriminator is None or self.objective.adversarial.start_step is None:
            return [phase]
        discriminator = Phase(
            name="discriminator",
            modules={"discriminator": self.discriminator},
            units={"discriminator": self.discriminator.units()},
            loss=self.discriminator_loss,
            start_step=self.objective.adversarial.start_step,
            averaged=False,
        )
        return [phase, discriminator]

    @abc.abstractmethod
    def reconstruct(self, prepared: Any) -> Any:
        """Network's output for a micro-batch, with `image_BCHW`, the reconstructions (B, 3, H, W)."""

    @abc.abstractmethod
    def loss(self, prepared: Any) -> StepOutput:
        """Autoencoder's loss (B,); `loss_raw` is the distance of pixels. Does not sync."""

    def judge(self, made_BCHW: Tensor, prepared: PreparedPictures) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (B,) of reconstructions, as a function of them, and a report; keep them for the opponent.

        Differentiated here and not in the network's backward pass: the adaptive weight needs both gradients, and the
        discriminator's weights must get none. Where a mask is 0, features and discriminator get the original.
        """
        prepared.made_BCHW = made_BCHW.detach()
        objective, leaf_BCHW = self.objective, made_BCHW.detach().requires_grad_()
        image_BCHW, mask_B1HW = prepared.image_BCHW, prepared.mask_B1HW
        with torch.enable_grad():
            pixels_B = objective.pixels(leaf_BCHW, image_BCHW, mask_B1HW)
            seen_BCHW = unmasked(leaf_BCHW, image_BCHW, mask_B1HW)
            value_B, report = pixels_B, {"loss_raw": pixels_B.detach()}
            if self.features is not None and self._step >= objective.perceptual.start_step:
                distance_B = self.features(seen_BCHW, image_BCHW)
                value_B = value_B + objective.perceptual.weight * distance_B
                report["loss_perceptual"] = distance_B.detach()
            (gradient_BCHW,) = torch.autograd.grad(value_B.sum(), leaf_BCHW)
            if self._discriminator_active():
                fooled_B = -self.discriminator(seen_BCHW).mean(dim=(1, 2))  # type: ignore[misc]
                (other_BCHW,) = torch.autograd.grad(fooled_B.sum(), leaf_BCHW)
                weight_B = adaptive_weight(gradient_BCHW, other_BCHW, most=objective.adversarial.max_weight)
                share_B = objective.adversarial.weight * weight_B
                gradient_BCHW = gradient_BCHW + share_B[:, None, None, None] * other_BCHW
                value_B = value_B + share_B * fooled_B
                report |= {"loss_adversarial": fooled_B.detach(), "adaptive_weight": weight_B}
        return with_gradient(made_BCHW, value_B, gradient_BCHW), report

    def _discriminator_active(self) -> bool:
        start = self.objective.adversarial.start_step
        return self.discriminator is not None and start is not None and self._step >= start

    def discriminator_loss(self, prepared: PreparedPictures) -> StepOutput:
        """Discriminator's loss (B,) on images and on their reconstructions. Does not sync."""
        if self.discriminator is None:
            raise AssertionError("no discriminator, no phase of its own")
        made_BCHW = prepared.made_BCHW
        if made_BCHW is None:
            with torch.no_grad():
                made_BCHW = self.reconstruct(prepared).image_BCHW
        seen_BCHW = unmasked(made_BCHW.detach(), prepared.image_BCHW, prepared.mask_B1HW)
        real, fake = self.discriminator(torch.cat([prepared.image_BCHW, seen_BCHW])).chunk(2)
        loss_B = hinge(real, fake)
        report = {
            "loss_raw": loss_B.detach(),
            "score_real": real.detach().mean(dim=(1, 2)),
            "score_made": fake.detach().mean(dim=(1, 2)),
        }
        return StepOutput(loss_B=weighted(loss_B, prepared.weight_B), report=report)

    def exports(self) -> Mapping[str, Export]:
        """Stage's exports, frozen weights included."""
        network = self.stage.network
        return {n: Export(module=network, write=save, whole=True) for n, save in self.stage.exports().items()}

    def after_step(self, report: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Count the step."""
        self._step += 1
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Step."""
        return {"step": torch.tensor(self._step)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self._step = int(state["step"])


def unmasked(made_BCHW: Tensor, image_BCHW: Tensor, mask_B1HW: Tensor | None) -> Tensor:
    """Reconstructions (B, 3, H, W), replaced by the originals where the mask is 0."""
    return made_BCHW if mask_B1HW is None else image_BCHW + mask_B1HW * (made_BCHW - image_BCHW)


def adaptive_weight(gradient_BCHW: Tensor, other_BCHW: Tensor, *, most: float) -> Tensor:
    """Ratio of norms of two gradients (B, 3, H, W), the second the adversarial loss's, (B,) in [0, most].

    Esser et al. 2021, eq. 7, with two differences: gradients are taken at the reconstruction, which is never sharded,
    not at the decoder's last layer; and each sample has its own weight, whatever its rank and micro-batch.
    """
    length_B, other_B = (torch.linalg.vector_norm(g.flatten(1), dim=1) for g in (gradient_BCHW, other_BCHW))
    return torch.clamp(length_B / other_B.clamp(min=torch.finfo(torch.float32).tiny), 0.0, most)


def hinge(score_real: Tensor, score_fake: Tensor) -> Tensor:
    """Discriminator's loss (B,) of scores (B, h, w) (Lim and Ye 2017), half of each."""
    shortfall = torch.relu(1 - score_real) + torch.relu(1 + score_fake)
    return 0.5 * shortfall.mean(dim=(1, 2))


def with_gradient(at_BCHW: Tensor, value_B: Tensor, gradient_BCHW: Tensor) -> Tensor:
    """`value_B` as a function of `at_BCHW` with the given gradient: passes it to the network below."""
    linear_B = (at_BCHW * gradient_BCHW.detach()).sum(dim=(1, 2, 3))
    return value_B.detach() + (linear_B - linear_B.detach())
