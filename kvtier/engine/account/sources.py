"""Counts where loaded KV data came from, what it saved, and why the rest was missing.

Part of the primary tier's actor, which calls it where a request loads, where blocks arrive or
leave, and where a request finds no more of its prefix.

Sources are numbered: 0 is the primary tier, then the secondary tiers in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.core.statistics import Observed, SourceCounts
from kvtier.engine.account.absences import Absences

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvtier.core.statistics import AbsenceReason, PrimaryCounts
    from kvtier.plugin_api.keys import Key

PRIMARY: Final = 0


class Account:
    """The account of one engine."""

    def __init__(self, primary: PrimaryCounts, slot_count: int, tier_count: int) -> None:
        self.primary = primary  #: the counts that are of no source
        self.counts = [SourceCounts() for _ in range(1 + tier_count)]
        self.misses: list[dict[str, int]] = [{} for _ in self.counts]
        self.absent_seconds: Observed[tuple[int, float]] = Observed()  #: source, age of an eviction
        self.wait_seconds: Observed[float] = Observed()  #: of requests that waited for tiers
        self._absences = Absences(slot_count)
        self._unread: dict[Key, int] = {}  # promoted, and not read by a request yet

    # --- loads ---

    def on_load(self, keys: Sequence[Key], delivered: Mapping[Key, int], tokens: int) -> None:
        """Note that the GPU loads ``keys``, and so computes ``tokens`` less.

        ``delivered``: the request's blocks that tiers have brought, with the tier's number. The
        tokens are split by blocks.
        """
        if self._unread:
            self._read(keys, delivered)
        left = tokens
        if delivered and tokens > 0:
            by_tier: dict[int, int] = {}
            for key in keys:
                tier = delivered.get(key)
                if tier is not None:
                    by_tier[tier] = by_tier.get(tier, 0) + 1
            for tier, count in by_tier.items():
                share = tokens * count // len(keys)
                self.counts[1 + tier].loaded_tokens += share
                left -= share
        self.counts[PRIMARY].loaded_tokens += max(0, left)

    def _read(self, keys: Sequence[Key], delivered: Mapping[Key, int]) -> None:
        unread = self._unread
        for key in delivered:
            unread.pop(key, None)
        if unread and not unread.keys().isdisjoint(keys):  # others had them promoted
            for key in keys:
                unread.pop(key, None)

    def on_arrived(self, keys: Collection[Key], tier: int) -> None:
        """Note that a tier has delivered blocks."""
        self._unread.update(dict.fromkeys(keys, tier))

    def on_wait_ended(self, seconds: float) -> None:
        """Note that a request goes on that has waited for tiers for so long."""
        self.wait_seconds.add(seconds)

    # --- blocks that go ---

    def on_evicted(self, keys: Sequence[Key], now: float) -> None:
        """Note that blocks leave the primary tier."""
        unread = self._unread
        if unread and not unread.keys().isdisjoint(keys):
            for key in keys:
                tier = unread.pop(key, None)
                if tier is not None:
                    self.counts[1 + tier].wasted_blocks += 1
        self._absences.add(keys, PRIMARY, "evicted", now)

    def on_gone(self, keys: Sequence[Key], tier: int, reason: AbsenceReason, now: float) -> None:
        """Note that a tier has lost blocks, failed to deliver them, or did not take them."""
        self._absences.add(keys, 1 + tier, reason, now)

    def reset(self) -> None:
        """Forget all blocks: a new epoch begins."""
        self._unread.clear()
        self._absences.clear()

    # --- misses ---

    def on_miss(self, key: Key, known: tuple[int, AbsenceReason] | None, now: float) -> None:
        """Note the first block that a request does not get. ``known``: source and reason."""
        absence = None if known is not None else self._absences.of(key)
        if absence is None:
            source, reason = known or (PRIMARY, "never_stored")
            weight = 1
        else:
            source, reason, since, weight = absence
            if reason == "evicted":
                self.absent_seconds.add((source, max(0.0, now - since)))
        counts = self.misses[source]
        counts[reason] = counts.get(reason, 0) + weight
