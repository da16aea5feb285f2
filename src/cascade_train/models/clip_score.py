"""CLIPScore: how well pictures fit their captions, by a CLIP that the user names.

Shape legend: B batch, H W image size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights import check_dtypes


class ClipScore:
    """Cosine of the embeddings of a picture and its caption, times 100 (Hessel et al. 2021, without their factor 2.5).

    As torchmetrics' `CLIPScore`, but that a caption too long for the tower keeps its end token.
    """

    def __init__(self, weights: str, *, device: torch.device, key: str) -> None:
        """Load the frozen towers in fp32 with their own preprocessing and tokenizer; nothing is downloaded.

        `weights` is a folder of transformers, such as a copy of openai/clip-vit-large-patch14; else a ConfigError names
        `key`.
        """
        from transformers import CLIPModel, CLIPProcessor  # takes seconds

        if not Path(weights).is_dir():
            raise ConfigError(
                f"{key}={weights}: no such folder. Name a local folder of a CLIP, with weights, preprocessor and "
                "tokenizer, e.g. by: hf download openai/clip-vit-large-patch14 --local-dir clip"
            )
        try:
            model: Any = CLIPModel.from_pretrained(weights, dtype=torch.float32, local_files_only=True)
            self._processor: Any = CLIPProcessor.from_pretrained(weights, local_files_only=True)
        except (OSError, ValueError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"{key}={weights}: is no whole CLIP of transformers, with weights, preprocessor and tokenizer: {reason}"
            ) from error
        check_dtypes(weights, key=key)
        self._model = model.eval().requires_grad_(False).to(device)
        self._device = device
        self._room = model.config.text_config.max_position_embeddings

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor], captions: Sequence[str]) -> Tensor:
        """Return the score of each picture (3, H, W) uint8, in [-100, 100], (B,) fp32 on the host; higher is better."""
        text = self._processor(
            text=list(captions), return_tensors="pt", padding=True, truncation=True, max_length=self._room
        )
        pixels = self._processor(images=[image.cpu() for image in images], return_tensors="pt")
        found = self._model(**text.to(self._device), pixel_values=pixels["pixel_values"].to(self._device))
        score_B: Tensor = 100 * (found.image_embeds * found.text_embeds).sum(dim=-1)
        return score_B.cpu()
