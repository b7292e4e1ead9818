"""Counters that are picked by their names, where mypy sees no attribute."""

from __future__ import annotations

import pytest

from kvtier.core.statistics import TierCounts
from kvtier.tools.replay.report import _TROUBLE
from kvtier.tools.replay.report_tables import TIER_FAULTS
from stress.record import NOTICED


@pytest.mark.parametrize("names", [_TROUBLE, TIER_FAULTS, NOTICED])
def test_each_is_a_counter_of_a_tier(names: object) -> None:
    """One had another name by then, and a soak ended with it."""
    assert set(names) <= set(TierCounts.__struct_fields__)  # type: ignore[call-overload]
