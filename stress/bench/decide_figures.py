"""What ``stress.bench decide`` makes of its times: ratios, and when a step was noticed."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from stress.bench.decide_plan import AUTO, LOAD, RECOMPUTE, WINDOW

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROMISED: Final = 1.1
"""Of the better choice's first token, in each cell and after each step."""

PROMISED_MEDIAN: Final = 1.0
"""The same, in the median over all cells."""

PROMISED_REQUESTS: Final = 10
"""After so many requests a step of a tier's rate has been noticed."""


def cell_figures(first_token_s: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return what one cell shows; ``first_token_s``: of all requests, by policy."""
    means = {policy: statistics.fmean(times) for policy, times in first_token_s.items()}
    medians = {policy: statistics.median(times) for policy, times in first_token_s.items()}
    better = min((LOAD, RECOMPUTE), key=lambda policy: means[policy])
    return {
        "mean_s": means,
        "median_s": medians,
        "better": better,
        "ratio": means[AUTO] / means[better],
        "ratio_of_medians": medians[AUTO] / min(medians[LOAD], medians[RECOMPUTE]),
    }


def noticed_after(first_token_s: Sequence[float], better_s: float) -> int | None:
    """Return after how many requests a step has been noticed; None: not by the end.

    From there on, ``WINDOW`` requests in a row have a median of at most ``PROMISED`` times
    ``better_s``.
    """
    for start in range(len(first_token_s) - WINDOW + 1):
        if statistics.median(first_token_s[start : start + WINDOW]) <= PROMISED * better_s:
            return start
    return None
