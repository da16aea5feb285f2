"""Cases of Stage B's conditions and of Stage A (conditions, stage_a_roundtrip), run on our code."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional

from bench.parity_case import Outcome, Variant, recorded
from bench.parity_networks import CPU, store
from bench.parity_text import dropped_below, text_encoder
from bench.parity_training import RecordedBatch, build_objective, recorded_batch
from cascade_train.models.cascade.latent_codec import VQGAN
from cascade_train.models.cascade.semantic_compressor import IMAGENET_MEAN, IMAGENET_STD, SemanticCompressor
from cascade_train.models.cascade.stage_b import StageB
from cascade_train.models.cascade.unet_config import CascadeUNetConfig
from cascade_train.models.stage import Conditions
from cascade_train.tasks.reconstruction import Reconstruction

MODEL = Path(__file__).parents[1] / "conf" / "model" / "b_tiny.yaml"
SHRINK_RANGE = (0.5, 1.0)
STAGE_A = {
    **{"weights": None, "scale_factor": 1.0, "levels": 2, "bottleneck_blocks": 1},
    **{"embed_dim": 16, "latent_channels": 4, "num_vq_embeddings": 32},
}
"""One whose latents no case looks at."""


class PooledPixels(SemanticCompressor):
    """The case's stub of the compressor: normalised pixels averaged over 32 x 32, mixed by a matrix."""

    stride = 32

    def __init__(self, mixing: Tensor) -> None:
        self.mixing = mixing
        self.latent_channels = len(mixing)  # type: ignore[misc]

    def _make(self) -> tuple[nn.Module, float]:
        return nn.Identity(), 1.0

    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, C, H / 32, W / 32)."""
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (IMAGENET_MEAN, IMAGENET_STD))
        return torch.einsum("dc,bchw->bdhw", self.mixing, functional.avg_pool2d((image_BCHW - mean) / std, 32))


class ProbedStage(StageB):
    """Stage B that keeps what its network is given, and predicts zeros."""

    asked: list[Conditions]

    def predict(
        self, noised_BCHW: Tensor, timestep_ratio_B: Tensor, cond: Conditions, control: dict[int, Tensor] | None = None
    ) -> Tensor:
        """Keep the conditions."""
        self.asked.append(cond)
        return torch.zeros_like(noised_BCHW)


def conditions(variant: Variant, cond_drop_prob: float | None = None) -> Outcome:
    """Run the Stage B variants of conditions: what a task makes of captions and images, in training and sampling.

    Args:
        variant: of the case.
        cond_drop_prob: share of dropped captions; None = the one that ships.
    """
    call, images, captions = variant.args["call"], variant.inputs["images"], variant.args["captions"]
    stage = _stage(variant)
    task = Reconstruction(cond_drop_prob=cond_drop_prob, image_keep_prob=None)
    task.attach(stage, build_objective(adaptive=False), CPU)
    if not call.get("is_eval"):
        task.loss(task.prepare_batch(_training_batch(variant)))
        return _named(stage.asked[0])
    noised = torch.zeros(len(captions), *stage.latent_shape(*images.shape[-2:]))
    task.predictor(captions, images)(noised, torch.zeros(len(captions)))
    half = slice(len(captions), None) if call.get("is_unconditional") else slice(len(captions))
    return _named({name: value[half] for name, value in stage.asked[0].items()})


def _named(cond: Conditions) -> Outcome:
    return Outcome({"clip": cond["clip_text_pooled"], "effnet": cond["effnet"]})


def _stage(variant: Variant) -> ProbedStage:
    encoder = text_encoder(variant.args, variant.weights)
    node = OmegaConf.to_container(OmegaConf.load(MODEL).network)
    widths = {"clip_text_pooled_in_channels": encoder.projection_dim}
    arguments = {key: value for key, value in (node | widths).items() if key != "_target_"}  # type: ignore[operator]
    stage = ProbedStage(
        image_size=96,
        precision="fp32",
        seed=0,
        random_encoders=False,
        weights=None,
        shrink_range=list(SHRINK_RANGE),
        network=CascadeUNetConfig(**arguments),
        text_encoder=encoder,
        semantic_compressor=PooledPixels(variant.inputs["E"]),
        stage_a=VQGAN(**STAGE_A),
    )
    stage.stage_a.build(device=CPU)
    stage.network, stage.asked = stage.network_config.build(), []
    return stage


def _training_batch(variant: Variant) -> RecordedBatch:
    """Return the variant's images and captions; its one factor is every sample's."""
    images, low = variant.inputs["images"], SHRINK_RANGE[0]
    (factor,) = recorded(variant.inputs, "np_uniform")
    images_dropped, captions_kept = recorded(variant.inputs, "np_rand")
    samples, _, height, width = images.shape
    draws = {
        "caption_drop": dropped_below(captions_kept),
        "image_keep": dropped_below(images_dropped),
        "shrink": ((factor - low) / (SHRINK_RANGE[1] - low)).expand(samples),
        "timestep": torch.full((samples,), 0.5),
        "noise": torch.zeros(samples, 4, height // 4, width // 4),
    }
    batch = recorded_batch(0, torch.zeros(samples, 1, height, width), variant.args["captions"], draws)
    return RecordedBatch(**{**vars(batch), "image_BCHW": images * 255})


@torch.no_grad()
def stage_a(variant: Variant) -> Outcome:
    """Run stage_a_roundtrip: latents, images from them, and the codebook, its weights loaded as a user's are."""
    args, given = variant.args["ctor"], variant.inputs
    with tempfile.TemporaryDirectory() as folder:
        codec = VQGAN(
            weights=store(variant.weights, Path(folder)),
            scale_factor=args["scale_factor"],
            levels=args["levels"],
            bottleneck_blocks=args["bottleneck_blocks"],
            embed_dim=args["c_hidden"],
            latent_channels=args["c_latent"],
            num_vq_embeddings=args["codebook_size"],
        )
        codec.build(device=CPU)
    latent, scale, quantizer = codec.encode(given["image"]), codec.scale_factor, codec.module.vquantizer
    quantised, loss, (_, _, indices) = quantizer(latent * scale)
    batch, _, height, width = latent.shape
    got = {
        "latent": latent,
        "decoded_from_latent": codec.decode(latent),
        "decoded_given": codec.decode(given["latent_given"]),
        "decoded_from_quantised": codec.decode(quantised / scale),
        "forward.quantised.image": codec.decode(quantised / scale),
        "forward.quantised.vq_loss": loss,
        "idx2vq": quantizer.get_codebook_entry(indices, (batch, height, width, latent.shape[1])),
        "q.indices": indices.view(batch, height, width),
        "q.latent_continuous": latent,
        "q.latent_quantised": quantised / scale,
        "q.loss": loss,
    }
    return Outcome({name: value for name, value in got.items() if name in variant.outputs})
