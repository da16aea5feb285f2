"""CLIPScore is that of its library, and a folder without a CLIP is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.clip_score import ClipScore
from cascade_train.models.text_encoder import PACKAGED_TOKENIZER

CPU = torch.device("cpu")
CAPTIONS = ["a red circle", "a blue star on a green background, which is a longer caption"]


def tiny_clip(folder: Path) -> str:
    """Write a tiny CLIP with the packaged tokenizer, as transformers stores one, and return the folder."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(PACKAGED_TOKENIZER)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": len(tokenizer), "max_position_embeddings": 48}
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text | special, vision_config=vision, projection_dim=8))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.2 * torch.randn_like(value))
    model.save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return str(folder)


class Adapter:
    """Gives torchmetrics the embeddings, where transformers 5 returns them within an output."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config

    def to(self, device: torch.device) -> Adapter:
        return self

    def get_image_features(self, pixels: Tensor) -> Tensor:
        return self.model.get_image_features(pixels).pooler_output

    def get_text_features(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model.get_text_features(ids, mask).pooler_output


def library_score(score: ClipScore, images: list[Tensor], captions: list[str]) -> float:
    """Return what torchmetrics makes of pictures and captions with the same CLIP."""
    from torchmetrics.functional.multimodal import clip_score

    made = (Adapter(score._model), score._processor)
    return float(clip_score(images, captions, model_name_or_path=lambda: made))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_clip(tmp_path_factory.mktemp("clip"))


def test_the_score_is_that_of_torchmetrics(clip: str) -> None:
    score = ClipScore(clip, device=CPU, key="clip")
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(256, (3, 40, 48), generator=generator).byte() for _ in CAPTIONS]
    score_B = score(images, CAPTIONS)
    assert score_B.shape == (2,)
    assert abs(score_B[0] - score_B[1]) > 0.1
    for image, caption, own in zip(images, CAPTIONS, score_B.tolist(), strict=True):
        assert max(0.0, own) == pytest.approx(library_score(score, [image], [caption]), abs=1e-3)
    long = score(images[:1], [" ".join(["circle"] * 60)])
    assert long.isfinite().all(), "a caption that is too long is cut"


def test_only_a_folder_with_a_whole_clip_is_taken(clip: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="clip=openai/clip: no such folder. Name a local folder of a CLIP"):
        ClipScore("openai/clip", device=CPU, key="clip")
    with pytest.raises(ConfigError, match="clip=.*: is no whole CLIP of transformers, with weights, preprocessor"):
        ClipScore(str(tmp_path), device=CPU, key="clip")
