"""Cases of the control filters (control_filters), run on our code; recorded draws stand in for the generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bench.parity_case import Comparison, Outcome, Variant
from bench.parity_networks import CPU, recipe_fill
from cascade_train.filters.base import map_at_picture_size
from cascade_train.filters.canny import CannyFilter
from cascade_train.filters.inpaint import SaliencyNetwork, mask_images, salient_mask
from cascade_train.filters.qr import BrightnessFilter, blobs, levels
from cascade_train.filters.super_resolution import LatentSuperResolutionFilter, SuperResolutionFilter
from cascade_train.models.cascade.semantic_compressor import EfficientNetCompressor

OTHER_PIXELS = {"canny": 0.01, "qr": 0.005, "inpaint": 0.005}
"""Share of pixels that may differ, by the beginning of a variant's name: what the case says of ties and libraries."""

CROPPED = "the original's result is smaller than the picture; compared on the part of the picture that it shows"
ONE_FOR_ALL = "the original draws once for a batch and takes the levels of its first picture: so do all pictures here"


def filters(variant: Variant) -> Outcome:
    """Run control_filters: the map of stored pictures."""
    outcome = RUNNERS[variant.args["filter"]](variant, variant.inputs["image"])
    kind = variant.name.partition("_")[0]
    if kind in OTHER_PIXELS:
        _allow_other_pixels(outcome, variant.outputs["y"], OTHER_PIXELS[kind])
    return outcome


def canny(variant: Variant, image_BCHW: Tensor) -> Outcome:
    """Run the edges of pictures that are no whole numbers, which only these cases have."""
    ours = CannyFilter(**{"resize": 224, "low": 100, "high": 200, **variant.args["ctor"]})
    edges = torch.stack([torch.from_numpy(ours.edges(255 * image_CHW)) for image_CHW in image_BCHW])
    return Outcome({"y": map_at_picture_size(image_BCHW, {"control_map": edges})})


def brightness(variant: Variant, image_BCHW: Tensor) -> Outcome:
    """Run the levels, the recorded kernels and sigma given to each picture, the levels of the first to all."""
    defaults: dict[str, Any] = {"resize": 224, "blobify": True, "dilation_kernels": [3, 5, 7], "blur_kernels": [15]}
    ours = BrightnessFilter(**{**defaults, **variant.args["ctor"]})
    values = [ours.value(image_CHW) for image_CHW in image_BCHW]
    if ours.blobify:
        kernel, blur, *sigma = (float(draw) for draw in variant.draws)
        values = [blobs(value, int(kernel), int(blur), *sigma or [0.0]) for value in values]
    found = torch.stack([torch.from_numpy(levels(value, values[0]))[None] for value in values])
    return Outcome({"y": map_at_picture_size(image_BCHW, {"control_map": found})}, notes=[ONE_FOR_ALL])


def super_resolution(variant: Variant, image_BCHW: Tensor) -> Outcome:
    """Run the coarse pictures."""
    height, width = variant.outputs["y"].shape[-2:]
    shown_BCHW = image_BCHW[..., :height, :width]
    ours = SuperResolutionFilter(**{"scale_factor": 0.25, **variant.args["ctor"]})
    notes = [] if shown_BCHW.shape == image_BCHW.shape else [CROPPED]
    return Outcome({"y": ours.build(device=CPU, encode=_no_encoder)(shown_BCHW, {})}, notes=notes)


def latents(variant: Variant, image_BCHW: Tensor) -> Outcome:
    """Run the latents of smaller copies, the encoder's weights made by the cases' recipe."""
    args = variant.args
    compressor = EfficientNetCompressor(weights=None)
    compressor.build(device=CPU)
    digest = recipe_fill(compressor.module, args["recipe_seed"], args["recipe_gain"])
    problem = None if digest == variant.facts["recipe_sha256"] else "the recipe gave other weights"
    ours = LatentSuperResolutionFilter(**{"scale_factor": 0.5, **args["ctor"]})
    latent_BCHW = ours.build(device=CPU, encode=compressor.encode)(image_BCHW, {})
    got = {"y0": latent_BCHW, "y1": ours.preview(latent_BCHW, image_BCHW)}
    return Outcome(got, facts=[Comparison("recipe_sha256", 0.0, 0.0, problem)])


def inpaint(variant: Variant, image_BCHW: Tensor) -> Outcome:
    """Run the pictures with a hole: salient things at the recorded threshold, or the given mask."""
    if "mask" in variant.inputs:
        return Outcome({"y": mask_images(image_BCHW, {"control_mask": variant.inputs["mask"]})})
    network = SaliencyNetwork().eval()
    network.load_state_dict(variant.weights)
    threshold, outpaint = _drawn(variant.args["call"], variant)
    one_B111 = image_BCHW.new_ones(len(image_BCHW), 1, 1, 1)
    with torch.no_grad():
        mask_B1HW = salient_mask(network, image_BCHW, threshold * one_B111, outpaint * one_B111 > 0)
    return Outcome({"y": mask_images(image_BCHW, {"control_mask": mask_B1HW})})


def _drawn(given: Mapping[str, Any], variant: Variant) -> tuple[float, bool]:
    """Return threshold and inversion, given or recorded; the original always draws the threshold, and that first."""
    share = {"p_outpaint": 0.4, **variant.args["ctor"]}["p_outpaint"]
    draws = [float(draw) for draw in variant.draws]
    threshold = given["threshold"] if given.get("threshold") is not None else draws[0]
    outpaint = given["outpaint"] if given.get("outpaint") is not None else draws[-1] < share
    return threshold, outpaint


def _no_encoder(image_BCHW: Tensor) -> Tensor:
    raise AssertionError("this filter needs no latents")


def _allow_other_pixels(outcome: Outcome, expected: Tensor, share: float) -> None:
    """Compare the share of pixels that differ with what the case allows, and the others exactly."""
    if outcome.got["y"].shape != expected.shape:
        return
    equal = (outcome.got["y"] - expected).abs() <= 1e-4
    other = 1 - float(equal.float().mean())
    outcome.facts.append(Comparison("y: share of other pixels", other, share))
    if other <= share:
        outcome.masks["y"] = equal


RUNNERS: dict[str, Callable[[Variant, Tensor], Outcome]] = {
    "CannyFilter": canny,
    "InpaintFilter": inpaint,
    "QRFilter": brightness,
    "SREffnetFilter": latents,
    "SRFilter": super_resolution,
}
