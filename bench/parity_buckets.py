"""The case of aspect-ratio buckets (bucketeer), run on our code with the original's choices."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from bench.parity_case import Comparison, NotCoveredError, Outcome, Variant, fact
from cascade_train.data.buckets import Buckets, BucketTable, bucket_size, parse_ratios, with_reciprocals

RESIZED = (
    "pictures are cut to their bucket's shape and resized once; the original resizes to more than it needs, then cuts"
)


def bucketeer(variant: Variant) -> Outcome:
    """Run bucketeer: ratios, sizes, and which picture goes where."""
    if variant.args["mode"] == "pairs":
        raise NotCoveredError(RESIZED)
    given = variant.args["ctor"]
    ratios = parse_ratios(variant.args["ratios"])
    if given.get("reverse_list", True):
        ratios = with_reciprocals(ratios)
    sizes = [list(bucket_size(ratio, given["density"], given["factor"])) for ratio in ratios]
    facts = [
        fact("ratios", _different(ratios, variant.facts["ratios_after_reversal"]), 0, 0.0),
        fact("sizes", _different(sizes, variant.facts["sizes_hw"]), 0, 0.0),
        fact("distinct sizes", len({tuple(size) for size in sizes}), variant.facts["n_distinct_buckets"], 0.0),
    ]
    left_out = {"resize_size": RESIZED, "resized_h_w": RESIZED, "batch.*": RESIZED}
    if not given.get("reverse_list", True):
        return Outcome({}, left_out=left_out | {"closest_h_w": "our tables always hold the reciprocals"}, facts=facts)
    table = Buckets(multiple_px=given["factor"], distance="linear").table(
        _side(given["density"]), list(map(_text, ratios))
    )
    if variant.args["mode"] == "batches":
        return Outcome({}, left_out=left_out, facts=[*facts, _batches(variant, table)])
    return Outcome({"closest_h_w": closest(table, variant.inputs["image_sizes_hw"])}, left_out=left_out, facts=facts)


def closest(table: BucketTable, size_N2: Tensor) -> Tensor:
    """Return height and width of the bucket of each picture, (N, 2), from (N, 2) heights and widths."""
    height_N, width_N = size_N2.numpy().T
    return torch.from_numpy(table.sizes_K2[table.nearest(width_N, height_N)])


def _batches(variant: Variant, table: BucketTable) -> Comparison:
    """Compare which pictures share a batch and which are left, whatever the batches' order."""
    images = [variant.inputs[f"image.{number:02d}"] for number in range(variant.args["n_images"])]
    size_of = closest(table, torch.tensor([image.shape[-2:] for image in images])).tolist()
    waiting: dict[str, list[int]] = {}
    batches = []
    for number, size in enumerate(size_of):
        queue = waiting.setdefault(str(size), [])
        queue.append(number)
        if len(queue) == variant.args["batch_size"]:
            batches.append(waiting.pop(str(size)))
    expected = sorted(batch["idx"] for batch in variant.facts["batches"])
    wrong = int(sorted(batches) != expected) + int(waiting != variant.facts["left_over"])
    return fact("batches", wrong, 0, 0.0)


def _different(got: list[Any], expected: list[Any]) -> int:
    return sum(a != b for a, b in zip(got, expected, strict=True))


def _side(area: int) -> int:
    side = round(area**0.5)
    assert side * side == area, "the case's area is no square"
    return side


def _text(ratio: float) -> str:
    return str(Fraction(ratio))
