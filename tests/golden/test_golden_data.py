"""Row filters against the original's verdicts (case multifilter)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cascade_train.data.row_filter import RowFilters, parse_row_filters, passing

WITHOUT_A_CALL = {"lambda s: len(s)": "lambda s: s"}
"""Calls are refused; of texts, and of what has no length, this says the same."""


def row_filters(rules: list[dict[str, Any]]) -> RowFilters:
    return parse_row_filters([[rule["key"], WITHOUT_A_CALL.get(rule["rule"], rule["rule"])] for rule in rules])


class TestRowFilters:
    case = "multifilter"

    @classmethod
    def takes(cls, variant: Any) -> bool:
        return "getter" not in variant.args

    def test_verdicts_are_the_originals(self, variant: Any) -> None:
        filters = row_filters(variant.args["rules"])
        raw = [None if s["as"] == "missing" else content(s) for s in variant.args["samples"]]
        verdicts = np.array([filters.verdicts(metadata) for metadata in raw])
        assert passing(verdicts).tolist() == variant.facts["verdicts"]

    def test_the_call_is_refused(self, variant: Any) -> None:
        calls = [rule for rule in variant.args["rules"] if rule["rule"] in WITHOUT_A_CALL]
        for rule in calls:
            with pytest.raises(ValueError, match=r"at character 11 \('len\(s\)'\): calls are not allowed"):
                parse_row_filters([[rule["key"], rule["rule"]]])

    def test_all_7_variants_were_found(self, variant_count: int) -> None:
        assert variant_count == 7


def content(sample: dict[str, Any]) -> bytes:
    """Return a sample's json as its tar holds it."""
    return sample["raw"].encode() if "raw" in sample else json.dumps(sample["json"]).encode()
