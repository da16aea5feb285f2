"""What a row filter refuses of the original's rules (case multifilter); its verdicts are in test_golden_cases.py."""

from __future__ import annotations

from typing import Any

import pytest

from bench.parity_data import WITHOUT_A_CALL
from cascade_train.data.index.row_filter import parse_row_filters


class TestRowFilters:
    case = "multifilter"

    @classmethod
    def takes(cls, variant: Any) -> bool:
        return any(rule["rule"] in WITHOUT_A_CALL for rule in variant.args.get("rules", ()))

    def test_a_call_is_refused(self, variant: Any) -> None:
        calls = [rule for rule in variant.args["rules"] if rule["rule"] in WITHOUT_A_CALL]
        assert calls
        for rule in calls:
            with pytest.raises(ValueError, match=r"at character 11 \('len\(s\)'\): calls are not allowed"):
                parse_row_filters([[rule["key"], rule["rule"]]])

    def test_there_is_one(self, variant_count: int) -> None:
        assert variant_count == 1
