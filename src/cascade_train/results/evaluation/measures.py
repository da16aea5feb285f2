"""The numbers of an evaluation, by the libraries that define them: sets of pictures, pairs, pictures and captions.

Networks come from files that the user names; nothing is downloaded. What is compared is decided in evaluate.py.

Shape legend: B pictures of a batch, N pictures of a set, D features, H W size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from cascade_train.assembly.build import build_node
from cascade_train.config.groups import option_files
from cascade_train.distributed.consensus import from_every_rank
from cascade_train.distributed.process_group import World
from cascade_train.errors import ConfigError, install_hint
from cascade_train.models.image_quality import ClipScore, check_installed, image_quality, load_inception, load_lpips

PACKAGED_FEATURES = "package:tiny"
"""Names the compressor of the tiny cascade, whose features need no file."""

NEIGHBOURS = 3
"""Of precision and recall (Kynkäänniemi et al. 2019)."""

KID_SUBSET = 1000
"""Pictures of each of KID's 100 subsets at most, as in torch-fidelity."""

LEAST = NEIGHBOURS + 1
"""Pictures on each side that set measures need."""

Read = Callable[[tuple[int, ...]], Sequence[Tensor]]
Clip = Callable[[Sequence[Tensor], Sequence[str]], Tensor]
Lpips = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Networks that measure; None = not measured.

    Attributes:
        features: maps pictures (B, 3, H, W) float in [0, 1] to (B, D) fp32.
        clip: scores pictures (3, H, W) uint8 and captions, (B,).
        lpips: maps pictures and originals (B, 3, H, W) float in [0, 1] to distances (B,).
    """

    features: Callable[[Tensor], Tensor] | None
    clip: Clip | None
    lpips: Lpips | None


def load_networks(
    *, features: str | None, resize: str, clip: str | None, lpips: str | None, device: torch.device
) -> Networks:
    """Load the networks from what the keys of these names give."""
    check_installed()
    if features is not None and find_spec("torch_fidelity") is None:
        raise ConfigError(
            f"features={features}: FID, KID, precision and recall are computed by torch-fidelity, which is not "
            f"installed. {install_hint('metrics')}."
        )
    extract = None
    if features == PACKAGED_FEATURES:
        extract = load_tiny_features(device)
    elif features is not None:
        extract = load_inception(features, device=device, key="features", antialias=resize == "clean")
    return Networks(
        features=extract,
        clip=None if clip is None else ClipScore(clip, device=device, key="clip"),
        lpips=None if lpips is None else load_lpips(lpips, device=device, key="lpips"),
    )


def load_tiny_features(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Features of the tiny cascade's semantic compressor: (B, 3, H, W) float in [0, 1] to (B, 64) fp32.

    The latents of a picture resized to 96 x 96, averaged over its quarters. Distances of them compare tiny models with
    each other, and with nothing else.
    """
    compressor = build_node({**option_files("model")["c_tiny"]["semantic_compressor"], "weights": PACKAGED_FEATURES})
    compressor.build(device=device)

    @torch.no_grad()
    def features(image_BCHW: Tensor) -> Tensor:
        small_BCHW = functional.interpolate(
            image_BCHW.float(), (96, 96), mode="bilinear", align_corners=False, antialias=True
        )
        return functional.adaptive_avg_pool2d(compressor.encode(small_BCHW.clamp(0, 1)), 2).flatten(1)

    return features


def set_measures(made_ND: Tensor, real_ND: Tensor) -> dict[str, float]:
    """`fid`, `kid`, `kid_std`, `precision` and `recall` of features of two sets, by torch-fidelity.

    At least `LEAST` pictures are in each. The subsets of KID are drawn by the library's own seed.
    """
    from torch_fidelity import metric_fid, metric_kid, metric_prc

    moments = [metric_fid.fid_features_to_statistics(each) for each in (made_ND, real_ND)]
    subset = min(KID_SUBSET, len(made_ND), len(real_ND))
    kid = metric_kid.kid_features_to_metric(made_ND, real_ND, kid_subset_size=subset, verbose=False)
    in_parts = {"save_cpu_ram": True, "prc_batch_size": 1000}  # else the memory is that of all distances
    near = metric_prc.prc_features_to_metric(made_ND, real_ND, prc_neighborhood=NEIGHBOURS, verbose=False, **in_parts)
    return {
        "fid": metric_fid.fid_statistics_to_metric(*moments, verbose=False)[metric_fid.KEY_METRIC_FID],
        "kid": kid[metric_kid.KEY_METRIC_KID_MEAN],
        "kid_std": kid[metric_kid.KEY_METRIC_KID_STD],
        "precision": near[metric_prc.KEY_METRIC_PRECISION],
        "recall": near[metric_prc.KEY_METRIC_RECALL],
    }


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Pictures in batches of one size each, by number; `read` returns a batch's, (3, H, W) uint8. Ranks share them."""

    batches: Sequence[tuple[int, ...]]
    read: Read
    world: World

    def features(self, extract: Callable[[Tensor], Tensor]) -> Tensor:
        """Pictures' features by number, (N, D) fp32 on the host. Collective."""

        def of(batch: tuple[int, ...]) -> Tensor:
            images = self.read(batch)
            if len({each.shape for each in images}) > 1:
                raise ConfigError(
                    f"pictures {batch[0]} to {batch[-1]} of the evaluation differ in size; remove its out= folder"
                )
            return extract(self._stacked(images)).float().cpu()

        return self._rows(of)

    def caption_measures(self, captions: Sequence[str], clip: Clip) -> dict[str, float]:
        """`clip_score`, the mean, 0 at least, as torchmetrics has it. Collective."""
        score_N = self._rows(lambda batch: clip(self.read(batch), [captions[number] for number in batch]))
        return {"clip_score": max(0.0, float(score_N.mean()))}

    def pair_measures(self, originals: Read, lpips: Lpips | None) -> dict[str, float]:
        """Means of `psnr`, `ssim` and `lpips` of pictures against their originals. Collective.

        An original is brought to its picture's size by area, where that is smaller, as a preview is.
        """
        names = ["psnr", "ssim", *([] if lpips is None else ["lpips"])]

        def of(batch: tuple[int, ...]) -> Tensor:
            image_BCHW, original_BCHW = (self._stacked(read(batch)) for read in (self.read, originals))
            if image_BCHW.shape != original_BCHW.shape:
                original_BCHW = functional.interpolate(original_BCHW, image_BCHW.shape[-2:], mode="area")
            found: Mapping[str, Tensor] = image_quality(image_BCHW, original_BCHW)
            if lpips is not None:
                with torch.no_grad():
                    found = {**found, "lpips": lpips(image_BCHW, original_BCHW)}
            return torch.stack([found[name] for name in names], dim=1).cpu()

        return dict(zip(names, self._rows(of).mean(dim=0).tolist(), strict=True))

    def _stacked(self, images: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(images)).to(self.world.device, non_blocking=True).float() / 255

    def _rows(self, of: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """Rows that ranks make of their batches, by number. Collective."""
        ranks = range(self.world.ranks)
        shares = [self.batches[rank :: self.world.ranks] for rank in ranks]
        gathered = from_every_rank(lambda: [of(batch) for batch in shares[self.world.rank]])
        rows = torch.cat([part for made in gathered for part in made])
        numbers = torch.tensor([number for share in shares for batch in share for number in batch])
        return rows[numbers.argsort()]
