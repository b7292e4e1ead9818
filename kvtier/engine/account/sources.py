"""Counts where loaded KV data came from, what it saved, and why the rest was missing.

Part of the primary tier's actor, which calls it when a request loads, when blocks arrive or leave,
and when a request finds no more of its prefix.

Sources are numbered: 0 is the primary tier, then the secondary tiers in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.core.statistics import Observed, SourceCounts
from kvtier.engine.account.absences import Absences
from kvtier.engine.account.evictions import Evictions
from kvtier.plugin_api.backend import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.core.statistics import AbsenceReason, PrimaryCounts
    from kvtier.plugin_api.keys import Key

PRIMARY: Final = 0

_NOT_LOADED: Final[Mapping[Outcome, AbsenceReason]] = {
    Outcome.ABSENT: "gone",
    Outcome.DAMAGED: "damaged",
}


class Account:
    """The account of one engine."""

    def __init__(self, primary: PrimaryCounts, slot_count: int, tier_count: int) -> None:
        self.primary = primary  #: the counts that belong to no source
        self.counts = [SourceCounts() for _ in range(1 + tier_count)]
        self.misses: list[dict[str, int]] = [{} for _ in self.counts]
        self.absent_seconds: Observed[tuple[int, float]] = Observed()  #: source, age of eviction
        self.allocation_sizes: Observed[int] = Observed()  #: blocks wanted by each store
        self.wait_seconds: Observed[float] = Observed()  #: of requests that waited for tiers
        self._absences = Absences(slot_count)
        self._evictions = {PRIMARY: Evictions(self.counts[PRIMARY], slot_count)}
        self._unread: dict[Key, int] = {}  # promoted but not read by a request yet; the tier

    # --- loads ---

    def on_load(
        self, keys: Sequence[Key], delivered: Mapping[Key, int], tokens: int
    ) -> dict[int, int]:
        """Note that the GPU loads ``keys``, and so computes ``tokens`` fewer tokens.

        ``delivered``: the request's blocks that tiers delivered, with the tier's number. The
        tokens are split in proportion to blocks. Returns the tokens by source.
        """
        if self._unread:
            self._read(keys, delivered)
        loaded = {PRIMARY: max(0, tokens)}
        if delivered and tokens > 0:
            by_tier: dict[int, int] = {}
            for key in keys:
                tier = delivered.get(key)
                if tier is not None:
                    by_tier[tier] = by_tier.get(tier, 0) + 1
            for tier, count in by_tier.items():
                loaded[1 + tier] = share = tokens * count // len(keys)
                loaded[PRIMARY] -= share
        for source, share in loaded.items():
            self.counts[source].loaded_tokens += share
        return loaded

    def _read(self, keys: Sequence[Key], delivered: Mapping[Key, int]) -> None:
        unread = self._unread
        for key in delivered:
            unread.pop(key, None)
        if unread and not unread.keys().isdisjoint(keys):  # promoted for other requests
            for key in keys:
                unread.pop(key, None)

    def on_arrived(self, keys: Sequence[Key], tier: int) -> None:
        """Note that a tier has delivered blocks."""
        self._unread.update(dict.fromkeys(keys, tier))
        for source, evictions in self._evictions.items():
            note = evictions.forget if source == 1 + tier else evictions.on_miss
            note(keys)

    def on_computed(self, keys: Sequence[Key]) -> None:
        """Note blocks that the GPU computed; called before others are evicted for them."""
        for evictions in self._evictions.values():
            evictions.on_miss(keys)

    def on_wait_ended(self, seconds: float) -> None:
        """Note that a request waited for tiers for ``seconds``, and now continues."""
        self.wait_seconds.add(seconds)

    def follow_evictions(self, tier: int, capacity_blocks: int) -> None:
        """Note that a tier evicts blocks by itself, to hold at most ``capacity_blocks``."""
        source, known = 1 + tier, self._evictions.get(1 + tier)
        if known is None or known.capacity != capacity_blocks:  # a restart may change it
            self._evictions[source] = Evictions(self.counts[source], capacity_blocks)

    # --- blocks that leave ---

    def on_evicted(self, keys: Sequence[Key], now: float) -> None:
        """Note that blocks leave the primary tier."""
        unread = self._unread
        if unread and not unread.keys().isdisjoint(keys):
            for key in keys:
                tier = unread.pop(key, None)
                if tier is not None:
                    self.counts[1 + tier].wasted_blocks += 1
        self._evictions[PRIMARY].add(keys, now)

    def on_tier_evicted(self, keys: Sequence[Key], tier: int, now: float) -> None:
        """Note that a tier has evicted blocks to make room."""
        self._evictions[1 + tier].add(keys, now)

    def on_not_loaded(self, keys: Sequence[Key], tier: int, outcome: Outcome, now: float) -> None:
        """Note that a tier did not deliver blocks that it was known to have.

        ABSENT: it lost them since. A tier that evicts by itself has reported that already.
        """
        if outcome is Outcome.ABSENT and 1 + tier in self._evictions:
            return
        self._absences.add(keys, 1 + tier, _NOT_LOADED.get(outcome, "load_failed"), now)

    def on_gone(self, keys: Sequence[Key], tier: int, reason: AbsenceReason, now: float) -> None:
        """Note that a tier has lost blocks, failed to deliver them, or did not take them."""
        self._absences.add(keys, 1 + tier, reason, now)

    def on_stored(self, keys: Sequence[Key], tier: int) -> None:
        """Note that a tier has blocks."""
        self._absences.end_refusals(keys, 1 + tier)

    def reset(self) -> None:
        """Forget all blocks: a new epoch begins."""
        self._unread.clear()
        self._absences.clear()
        for evictions in self._evictions.values():
            evictions.clear()

    # --- misses ---

    def on_miss(
        self, key: Key, known: tuple[int, AbsenceReason] | None, now: float
    ) -> tuple[int, AbsenceReason]:
        """Note the first block that a request does not get; return the source and the reason.

        ``known``: both, if the caller knows them.
        """
        source, reason, weight = (*known, 1) if known is not None else self._why(key, now)
        counts = self.misses[source]
        counts[reason] = counts.get(reason, 0) + weight
        return source, reason

    def _why(self, key: Key, now: float) -> tuple[int, AbsenceReason, int]:
        """Return the source that had the block last, why it no longer has it, and the weight."""
        absence = self._absences.of(key)
        evicted = [
            (since, source)
            for source, evictions in self._evictions.items()
            if (since := evictions.since(key)) is not None
        ]
        if evicted:
            since, source = max(evicted)
            # Had tiers admitted it, they would still have a block that the primary tier evicted.
            is_why = source != PRIMARY or absence is None or absence.reason != "not_admitted"
            if is_why and (absence is None or since > absence.since):
                self.absent_seconds.add((source, max(0.0, now - since)))
                return source, "evicted", self._evictions[source].weight
        if absence is None:
            return PRIMARY, "never_stored", 1
        return absence.source, absence.reason, absence.weight
