"""How much tiers were used while faults lasted: a run in which nothing is served shows nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stress.record import Record

JUDGED_FROM_S: Final = 30.0
"""A run that is shorter may have met one long fault, and nothing else. In the gate nothing is
planned in seconds: there the run lasts until enough was served."""

SERVED_A_MINUTE_MIN: Final = 20
"""Blocks of each tier. One that is well for a tenth of the time serves ten times as many."""


def note_use(record: Record, tiers: Sequence[str], served: Mapping[int, int]) -> None:
    """Note what each tier has served under faults, and for how much of that time it was open.

    Raises ``Failure`` if one was hardly used: then the faults are too many to find anything.
    """
    minutes = record.faults_ended_s / 60
    closed: Counter[str] = Counter()
    for sample in record.samples:
        closed.update(tier for tier, state in sample.breakers.items() if state == "CLOSED")
    for number, tier in enumerate(tiers):
        record.figures[f"{tier}: % of the time closed"] = round(
            100 * closed[tier] / max(1, len(record.samples)), 1
        )
        record.figures[f"{tier}: blocks served a minute"] = round(served.get(number, 0) / minutes)
    idle = [
        tier
        for number, tier in enumerate(tiers)
        if served.get(number, 0) < SERVED_A_MINUTE_MIN * minutes
    ]
    if idle and record.planned_s > JUDGED_FROM_S:
        raise Failure(f"under these faults {', '.join(idle)} served next to nothing")
