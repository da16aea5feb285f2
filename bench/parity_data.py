"""Cases of the data (multifilter), run on our code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from bench.parity_case import NotCoveredError, Outcome, Variant, fact
from cascade_train.data.captions import Captions
from cascade_train.data.index.row_filter import PASSED, RowFilters, parse_row_filters, read_metadata
from cascade_train.data.sample import RawSample, UnreadableSampleError

WITHOUT_A_CALL = {"lambda s: len(s)": "lambda s: s"}
"""Calls are refused; of texts, and of what has no length, this says the same."""

TWO_CAPTIONS = (("old_caption", "caption"), "lambda o, n: __import__('json').loads(o)['og_caption'] + '|' + n")
"""The rule for which a template stands in."""

REFUSED = "calls in expressions are refused; one without a call that says the same of these samples stands in"


def multifilter(variant: Variant) -> Outcome:
    """Run multifilter: which samples pass a set of rules, or what a rule reads of them."""
    if "getter" in variant.args:
        return getter(variant)
    filters = row_filters(variant.args["rules"])
    raw = [None if s["as"] == "missing" else content(s) for s in variant.args["samples"]]
    verdicts = (np.array([filters.verdicts(metadata) for metadata in raw]) == PASSED).all(axis=1).tolist()
    wrong = sum(a is not b for a, b in zip(verdicts, variant.facts["verdicts"], strict=True))
    called = any(rule["rule"] in WITHOUT_A_CALL for rule in variant.args["rules"])
    return Outcome({}, facts=[fact("verdicts", wrong, 0, 0.0)], notes=[REFUSED] if called else [])


def getter(variant: Variant) -> Outcome:
    """Run the getter: the text that a rule makes of a sample's json, or that it fails."""
    rules = [(tuple(rule["key"]), rule["rule"]) for rule in variant.args["getter"]]
    if rules != [TWO_CAPTIONS]:
        raise NotCoveredError("a json gives captions and filters here, no other values")
    captions = Captions(key="caption", template="{old_caption.og_caption}|{caption}")
    wrong = 0
    for given, expected in zip(variant.args["samples"], variant.facts["getter"], strict=True):
        values = read_metadata(content(given)) or {}
        try:
            found = captions(RawSample(image=b"", caption="", key="", values=values), torch.Generator())
        except UnreadableSampleError:
            wrong += "raises" not in expected
        else:
            wrong += found != expected.get("value")
    return Outcome({}, facts=[fact("getter", wrong, 0, 0.0)], notes=[])


def row_filters(rules: list[dict[str, Any]]) -> RowFilters:
    """Return our filters for the case's rules."""
    return parse_row_filters([[rule["key"], WITHOUT_A_CALL.get(rule["rule"], rule["rule"])] for rule in rules])


def content(sample: dict[str, Any]) -> bytes:
    """Return a sample's json as its tar holds it."""
    return sample["raw"].encode() if "raw" in sample else json.dumps(sample["json"]).encode()
