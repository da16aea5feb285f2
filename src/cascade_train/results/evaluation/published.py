"""The networks by which pictures are measured in papers: where they are published, and which content they have.

Hashes: those of both files begin as the files are named, as torch.hub's do, and are recorded so by several projects.
"""

from __future__ import annotations

from cascade_train.files.hub import WebFile
from cascade_train.models.formats.weights_source import CONFIG_FILES, TOKENIZER_FILES, WeightsSpec

INCEPTION = WebFile(
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
    "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
)
"""FID's Inception V3."""

VGG16 = WebFile(
    "https://download.pytorch.org/models/vgg16-397923af.pth",
    "397923af8e79cdbb6a7127f12361acd7a2f83e06b05044ddf496e83de57a5bf0",
)
"""Torchvision's VGG-16, of which LPIPS compares layers."""

CLIP = WeightsSpec(
    key="clip",
    source="openai/clip-vit-large-patch14@32bd64288804d66eefd0ccbe215aa642df71cc41",
    beside=(*CONFIG_FILES, "preprocessor_config.json", *TOKENIZER_FILES),
)
"""Both towers, with their preprocessing and tokenizer."""

NETWORKS: dict[str, tuple[str, WebFile | WeightsSpec]] = {
    "inception": ("features", INCEPTION),
    "clip": ("clip", CLIP),
    "vgg16": ("lpips", VGG16),
}
"""Name -> the key of `cascade-train evaluate` that takes it, and what it is."""
