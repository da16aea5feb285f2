"""A control network beside a frozen network: samples follow a map that a filter makes of a picture.

Shape legend: B batch, C channels of the map, H W image size, h w size of the map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cascade_train.batch import Batch, SampleTransform, sample_seed
from cascade_train.diffusion.objective import Objective
from cascade_train.errors import ConfigError
from cascade_train.filters.base import CONTROL, ControlFilter, ControlMap, map_maker, transform_images
from cascade_train.models.control import Bottleneck, Conditions, Control, ControlOptions, ControlResiduals
from cascade_train.models.stage import Stage
from cascade_train.options import File, Share
from cascade_train.tasks.base import Export, Guide, ImageMaker, Phase, Predictor
from cascade_train.tasks.prepared import PreparedBatch
from cascade_train.tasks.text_to_image import TextToImage


@dataclass(frozen=True, kw_only=True)
class PreparedControl(PreparedBatch):
    """A micro-batch with its control maps.

    Attributes:
        control_BCHW: (B, C, h, w) fp32.
        drop_control_B: (B,) bool, whose map becomes 0 in training.
    """

    control_BCHW: Tensor
    drop_control_B: Tensor


@dataclass(kw_only=True, eq=False)
class ControlNet(TextToImage):
    """Trains a control network; the stage's network is frozen, with its dropout off.

    Each family has its own: diffusers' UNet its `ControlNetModel` (Zhang et al. 2023), a copy of the network's way
    down, which takes maps of the picture's size; grey ones become three equal channels.

    Args:
        filter: makes the maps of pictures.
        blocks: of Stage C: indices of the network's residual blocks that are controlled, in order of execution, down
            then up; null = those of `weights`, else the original's eight, scaled to the model.
        bottleneck: of Stage C: what makes features of a map: effnet (EfficientNet-V2-S) and small (five convolutions,
            for tiny models) take maps of the picture's size, simple and large of the latent's.
        backbone_weights: initial values of effnet: imagenet (torchvision's, downloaded), or a file or hub id of
            EfficientNet-V2-S, such as the semantic compressor's; null = values from the seed.
        weights: a control network to start from: a run, its export, a local file or one on the hub, ours, the
            original's, or a folder of diffusers; null = a new one, which begins without effect.
        control_drop_prob: share of samples whose map is 0 in training, in [0, 1].
        seed: of a new control network's values.
    """

    fits = ("control",)
    trains_network = False
    needs_image = True

    filter: ControlFilter
    blocks: list[int] | None
    bottleneck: Bottleneck
    backbone_weights: File[str | None]
    weights: File[str | None]
    control_drop_prob: Share[float]
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks is not None and (not self.blocks or len(set(self.blocks)) < len(self.blocks)):
            raise ValueError(
                f"blocks={self.blocks}: names no block, or one twice; name each once, or null for the default"
            )
        if self.backbone_weights is not None and self.bottleneck != "effnet":
            raise ValueError(
                f"backbone_weights={self.backbone_weights}: are for bottleneck=effnet, not {self.bottleneck}; null"
            )
        self._control: Control
        self._transform: SampleTransform | None = None
        self._map: ControlMap

    @property
    def controlnet(self) -> Any:
        """The module that trains."""
        return self._control.module

    def check_stage(self, stage: Stage) -> None:
        """Refuse options that mean nothing for the stage's control networks."""
        super().check_stage(stage)
        if not isinstance(getattr(self.filter, "channels", None), int):
            raise ConfigError(f"task.filter: {type(self.filter).__name__} has no `channels`; set those of its maps")
        stage.check_control(self._options())

    def attach(self, stage: Stage, objective: Objective, device: torch.device) -> None:
        """Take the built stage, freeze it, and add the control network; see `Task.attach`."""
        super().attach(stage, objective, device)
        stage.network.requires_grad_(requires_grad=False).eval()
        self._map = map_maker(self.filter, device=device, encode=stage.encode)
        self._control = stage.add_control(self._options(), device)

    def _options(self) -> ControlOptions:
        keys = ("weights", "blocks", "bottleneck", "backbone_weights", "seed")
        options = {name: getattr(self, name) for name in keys}
        return ControlOptions(channels=self.filter.channels, filter=self.filter.node(), **options)

    def sample_transform(self) -> SampleTransform:
        """Filter's half that runs in the data workers."""
        if self._transform is None:
            self._transform = self.filter.sample_transform()
        return self._transform

    def image_maker(self, stage: Stage, device: torch.device) -> ImageMaker:
        """Maker of `control`, the finished maps; a ConfigError for filters that draw."""
        if not self.filter.deterministic:
            raise ConfigError(
                f"task.filter: {type(self.filter).__name__} draws another map of a picture each epoch, which a cache"
                " cannot hold; fix its choices, or train without a cache"
            )
        control_map = map_maker(self.filter, device=device, encode=stage.encode)
        return lambda image_BCHW, maps: {CONTROL: control_map(image_BCHW, maps)}

    def phases(self) -> list[Phase]:
        """The one phase; the frozen network is a root beside the control network, so that both shard."""
        modules = {"network": self.stage.network, "controlnet": self.controlnet}
        units = {"network": self.stage.units(), "controlnet": self._control.units()}
        return [Phase(name="train", modules=modules, units=units, loss=self.loss)]

    def prepare_batch(self, batch: Batch) -> PreparedControl:
        """Draw the random choices, and finish the maps on the device; a ConfigError where a cache has none."""
        prepared = super().prepare_batch(batch)
        if CONTROL in batch.tensors:
            control_BCHW = self._copy(batch.tensors[CONTROL]).float()
        elif prepared.image_BCHW is None:
            raise ConfigError("the cache holds no control maps; make it with task=controlnet and this task.filter")
        else:
            control_BCHW = self._map(prepared.image_BCHW.float() / 255, self._made(batch.tensors))
        drop_B = self._copy(batch.uniform("control_drop") < self.control_drop_prob)
        return PreparedControl(**vars(prepared), control_BCHW=control_BCHW, drop_control_B=drop_B)

    def _made(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._copy(value) for name, value in tensors.items() if name.startswith("control_")}

    def control_residuals(self, prepared: PreparedBatch, *, training: bool) -> ControlResiduals:
        """Residuals of the batch's control maps; in training some maps are set to 0."""
        if not isinstance(prepared, PreparedControl):
            raise AssertionError("a batch that this task did not prepare")
        control_BCHW = prepared.control_BCHW
        if training and self.control_drop_prob > 0.0:
            control_BCHW = control_BCHW * ~prepared.drop_control_B[:, None, None, None]
        return self._control.residuals(control_BCHW)

    @torch.no_grad()
    def predictor(self, captions: Sequence[str], image_BCHW: Tensor | None, negative: str = "") -> Predictor:
        """Predictions under captions and pictures' maps, and these alone; a ConfigError if there are none."""
        if image_BCHW is None:
            raise ConfigError("a control network samples under an image; give image=… to filter, or control=…")
        residuals = self._control.residuals(self._maps(image_BCHW, range(len(image_BCHW))))
        return self.predictor_under(captions, None, residuals, negative=negative)

    @torch.no_grad()
    def guided_predictor(self, captions: Sequence[str], guide: Guide, negative: str = "") -> Predictor:
        """Predictions under captions and a user's pictures or maps; a ConfigError if they do not fit."""
        if guide.image_BCHW is None:
            return self.predictor(captions, None, negative)
        given_BCHW, wanted = self._copy(guide.image_BCHW).float() / 255, self.filter.channels
        if guide.is_map and wanted == 1:
            given_BCHW = given_BCHW[:, :3].mean(dim=1, keepdim=True)
        if guide.is_map and given_BCHW.shape[1] != wanted:
            raise ConfigError(
                f"control: a picture of {given_BCHW.shape[1]} channels, the maps of {type(self.filter).__name__} have "
                f"{wanted}; give image=…, of which it makes them"
            )
        maps_BCHW = given_BCHW if guide.is_map else self._maps(given_BCHW, guide.numbers)
        residuals = scale_residuals(self._control.residuals(maps_BCHW), guide.strength)
        return self.predictor_under(captions, self._variation(guide), residuals, negative=negative)

    @torch.no_grad()
    def shown(self, image_BCHW: Tensor) -> Mapping[str, Tensor]:
        """`control`, the previews of pictures' maps."""
        return {"control": self.filter.preview(self._maps(image_BCHW, range(len(image_BCHW))), image_BCHW)}

    def _maps(self, image_BCHW: Tensor, numbers: Sequence[int]) -> Tensor:
        """Maps of pictures (B, 3, H, W) float in [0, 1], with random choices seeded by their numbers."""
        generators = [torch.Generator().manual_seed(sample_seed(0, 0, number, "control")) for number in numbers]
        pixels_BCHW = (image_BCHW * 255).round().to(torch.uint8).cpu()
        return self._map(image_BCHW, self._made(transform_images(self.sample_transform(), pixels_BCHW, generators)))

    def exports(self) -> Mapping[str, Export]:
        """`controlnet`, a folder: of Stage C with a file in the original's layout, else diffusers'."""
        return {"controlnet": Export(module=self.controlnet, write=self._control.write)}

    def load_export(self, export: Path) -> None:
        """Load the control network of a run's `export/controlnet`."""
        self._control.load(str(export), key="from")


def scale_residuals(residuals: ControlResiduals, strength: float) -> ControlResiduals:
    """Control residuals times a factor."""

    def scaled(noised_BCHW: Tensor, timestep_ratio_B: Tensor, cond: Conditions) -> dict[int, Tensor]:
        return {n: strength * value for n, value in residuals(noised_BCHW, timestep_ratio_B, cond).items()}

    return scaled
