"""Cases of the data (multifilter), run on our code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from bench.parity_case import NotCoveredError, Outcome, Variant, fact
from cascade_train.data.row_filter import RowFilters, parse_row_filters, passing

WITHOUT_A_CALL = {"lambda s: len(s)": "lambda s: s"}
"""Calls are refused; of texts, and of what has no length, this says the same."""

REFUSED = "calls in expressions are refused; one without a call that says the same of these samples stands in"


def multifilter(variant: Variant) -> Outcome:
    """Run multifilter: which samples pass a set of rules."""
    if "getter" in variant.args:
        raise NotCoveredError("captions read by an expression are not built: `data` names the caption's key")
    filters = row_filters(variant.args["rules"])
    raw = [None if s["as"] == "missing" else content(s) for s in variant.args["samples"]]
    verdicts = passing(np.array([filters.verdicts(metadata) for metadata in raw])).tolist()
    wrong = sum(a is not b for a, b in zip(verdicts, variant.facts["verdicts"], strict=True))
    called = any(rule["rule"] in WITHOUT_A_CALL for rule in variant.args["rules"])
    return Outcome({}, facts=[fact("verdicts", wrong, 0, 0.0)], notes=[REFUSED] if called else [])


def row_filters(rules: list[dict[str, Any]]) -> RowFilters:
    """Return our filters for the case's rules."""
    return parse_row_filters([[rule["key"], WITHOUT_A_CALL.get(rule["rule"], rule["rule"])] for rule in rules])


def content(sample: dict[str, Any]) -> bytes:
    """Return a sample's json as its tar holds it."""
    return sample["raw"].encode() if "raw" in sample else json.dumps(sample["json"]).encode()
