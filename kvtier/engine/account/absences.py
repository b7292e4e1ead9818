"""Remembers which tier lost or never had a block, and why, for a sample of such blocks.

Evictions to make room are remembered separately (``kvtier/engine/account/evictions.py``).

A prefix ends at one block, so a request looks up one key here. Every n-th missing key is
remembered, and counts n times when it is looked up, so that the counts estimate those of all keys.
A small engine's keys are all remembered, and its counts are exact.

Rejected: remembering all of a large engine. At a million slots that is 200 MB for a horizon of
one turnover.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.engine.account.sampling import EveryNth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.statistics import AbsenceReason
    from kvtier.plugin_api.keys import Key

REMEMBERED_MIN: Final = 4096
REMEMBERED_MAX: Final = 32_768
SLOTS_A_KEY: Final = 16
"""One key is remembered for this many slots, within these limits."""

TURNOVERS: Final = 4
"""The horizon, in evictions, as a multiple of the slots."""


class Absence(NamedTuple):
    """Why a block is gone."""

    source: int
    reason: AbsenceReason
    since: float  #: seconds of the runtime's clock
    weight: int  #: how many blocks it stands for


class Absences:
    """The absences that one engine remembers."""

    def __init__(self, slot_count: int) -> None:
        horizon = TURNOVERS * slot_count
        remembered = min(max(slot_count // SLOTS_A_KEY, REMEMBERED_MIN), REMEMBERED_MAX)
        self._keys_max = min(horizon, remembered)
        self._sample = EveryNth(horizon // self._keys_max)
        self._of: dict[Key, Absence] = {}  # the oldest first
        self._has_refused = False  # whether any was not admitted

    def add(self, keys: Sequence[Key], source: int, reason: AbsenceReason, now: float) -> None:
        """Note that these blocks are gone from a source, or never got there."""
        sampled = self._sample.of(keys)
        if not sampled:
            return
        absence = Absence(source, reason, now, self._sample.every)
        for key in sampled:
            self._of.pop(key, None)
            self._of[key] = absence
        self._has_refused |= reason == "not_admitted"
        excess = len(self._of) - self._keys_max
        if excess > 0:
            for key in list(islice(self._of, excess)):
                del self._of[key]

    def end_refusals(self, keys: Sequence[Key], source: int) -> None:
        """Note that a source has blocks: it has admitted them after all."""
        if self._has_refused:
            for key in keys:
                before = self._of.get(key)
                if before and (before.source, before.reason) == (source, "not_admitted"):
                    del self._of[key]

    def of(self, key: Key) -> Absence | None:
        """Return why a block is gone, if it is remembered."""
        return self._of.get(key)

    def clear(self) -> None:
        """Forget all."""
        self._of.clear()
        self._has_refused = False
