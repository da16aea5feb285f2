"""The stage: latents of a KL autoencoder from what two towers of CLIP and one of T5 make of captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cascade_train.models.rectified_flow.family import RECTIFIED_FLOW
from cascade_train.models.rectified_flow.network_config import TransformerConfig
from cascade_train.models.rectified_flow.t5 import T5Encoder
from torch import Tensor, nn
from torch.nn.functional import pad

from cascade_train.models.autoencoder_kl import KLAutoencoder
from cascade_train.models.denoising_stage import DenoisingStage
from cascade_train.models.formats.weights import StoredValues
from cascade_train.models.initialize import DrawnValues, torch_rule
from cascade_train.models.stage import Conditions, Images, Save, Tokens
from cascade_train.models.text_encoder import SecondTextEncoder

TOWERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


@dataclass(kw_only=True, eq=False, repr=False)
class FlowStage(DenoisingStage):
    """Stable Diffusion 3 (Esser et al. 2024), at any size."""

    family = RECTIFIED_FLOW
    name = "rectified_flow"
    abilities = frozenset({"denoising", "text_to_image"})
    part = "transformer"
    frozen_parts = (*TOWERS, "vae")
    towers = frozen_parts
    widths = (
        ("in_channels", "vae", "latent_channels"),
        ("out_channels", "vae", "latent_channels"),
        ("joint_attention_dim", "text_encoder_3", "d_model"),
    )
    multiple_of = encoded_by = decoded_by = "vae"
    image_keep_prob = 0.0
    guidance_scale = 4.0
    guidance_rescale = 0.0
    noise_unit = "flow_timestep"
    needs_image = False
    latent_name = "latent"
    image_products = {"latent": "vae"}
    caption_products = {"text": TOWERS[0], "text_2": TOWERS[1], "text_3": TOWERS[2], "pooled": TOWERS[0]}

    network: TransformerConfig
    vae: KLAutoencoder
    text_encoder_2: SecondTextEncoder
    text_encoder_3: T5Encoder

    def _build_network(self, dtype: torch.dtype) -> None:
        self.network = self.network_config.build()
        nn.Module.to(self.network, dtype)
        if self.weights is None:
            self._values = DrawnValues(self.network, torch_rule(self.network), seed=self.seed)
        else:
            self._values = StoredValues(self.network, self.weights, part=self.part)

    def _image_multiple(self) -> int:
        return super()._image_multiple() * self.network_config.patch_size

    def set_activation_checkpointing(self, enabled: bool) -> None:
        self.network.set_recomputing(enabled)

    def _tokens_of(self, captions: Sequence[str]) -> Tokens:
        towers = [getattr(self, name).tokenize(captions) for name in TOWERS]
        endings = [name.removeprefix("text_encoder") for name in TOWERS]
        return {f"{n}{ending}": ids for ending, made in zip(endings, towers, strict=True) for n, ids in made.items()}

    def _text_of(self, tokens: Tokens) -> dict[str, Tensor]:
        text, pooled = self.text_encoder.encode(tokens)
        second = {name: tokens[f"{name}_2"] for name in ("input_ids", "attention_mask")}
        text_2, pooled_2 = self.text_encoder_2.encode(second)
        pooled = torch.cat([pooled[:, 0], pooled_2[:, 0]], dim=-1)
        text_3 = self.text_encoder_3.encode(tokens["input_ids_3"])
        return {"text": text, "text_2": text_2, "text_3": text_3, "pooled": pooled}

    def conditions(
        self, tokens: Tokens, images: Images | None = None, keep_image_B: Tensor | None = None, drawn: Any = None
    ) -> Conditions:
        made = self._encode_text(tokens)
        clip = torch.cat([made["text"], made["text_2"]], dim=-1)
        clip = pad(clip, (0, made["text_3"].shape[-1] - clip.shape[-1]))
        text = torch.cat([clip, made["text_3"]], dim=1)
        return {"encoder_hidden_states": text, "pooled_projections": made["pooled"]}

    def predict(
        self, noised_BCHW: Tensor, timestep_ratio_B: Tensor, cond: Conditions, control: dict[int, Tensor] | None = None
    ) -> Tensor:
        return self.network(noised_BCHW, timestep_ratio_B, **cond)

    def exports(self) -> Mapping[str, Save]:
        return {"pipeline": self._save}

    def _save(self, state: Mapping[str, Tensor], directory: Path) -> float:
        from cascade_train.models.rectified_flow.export import save_pipeline

        return save_pipeline(self, state, directory)
