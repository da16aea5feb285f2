"""The networks by which pictures are measured in papers: where they are published, and which content they have.

Hashes: those of both files begin as the files are named, as torch.hub's do, and are recorded so by several projects.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cascade_train.models.formats.weights_source import CONFIG_FILES, TOKENIZER_FILES, WeightsSpec


@dataclass(frozen=True)
class WebFile:
    """A file of the web by address, SHA-256 and bytes, kept in torch.hub's folder."""

    url: str
    sha256: str
    size: int

    @property
    def path(self) -> Path:
        """Where it lies, or would."""
        from torch import hub  # takes seconds

        return Path(hub.get_dir()) / "checkpoints" / self.url.rpartition("/")[2]

    def fetch(self) -> Path:
        """Its path, downloaded if it is not there; a RuntimeError where the content is another one."""
        from torch import hub  # takes seconds

        if not self.path.is_file():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            hub.download_url_to_file(self.url, str(self.path), hash_prefix=self.sha256, progress=False)
        return self.path


INCEPTION = WebFile(
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
    "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
    95_628_359,
)
"""FID's Inception V3."""

VGG16 = WebFile(
    "https://download.pytorch.org/models/vgg16-397923af.pth",
    "397923af8e79cdbb6a7127f12361acd7a2f83e06b05044ddf496e83de57a5bf0",
    553_433_881,
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
