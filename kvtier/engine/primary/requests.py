"""State that the primary tier keeps for each running request, and the GPU loads in flight.

A completion ends only loads that its own request began: a stray one removes
no other request's pin. Completions of loads from before a reset never get here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core.statistics import RequestReport
from kvtier.plugin_api.deadlines import NEVER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.core.statistics import AbsenceReason, PrimaryCounts
    from kvtier.engine.primary.tier_directory import Search
    from kvtier.plugin_api.keys import Key, RequestId


class Request:
    """One running request: the keys it looked up, and the tiers that delivered them."""

    __slots__ = (
        "_hits_counted",
        "_queries_counted",
        "has_waited",
        "hits",
        "is_weighed",
        "loaded_tokens",
        "missed",
        "misses",
        "patience_max_s",
        "patience_s",
        "reserved",
        "room_until",
        "room_wanted",
        "search",
        "sources",
        "waited_s",
        "waits_since",
        "was_missed",
    )

    def __init__(self, search: Search) -> None:
        self.search = search
        self.is_weighed = False  #: whether its split of loading and computing is decided
        self.patience_s = NEVER  #: how long it waits for a load
        self.patience_max_s = NEVER  #: the same, if its tier has become slower
        self.has_waited = False  #: for room, in this wait
        self.room_wanted = 0  #: how many slots it waits for; 0: it does not wait
        self.room_until = 0.0  #: then it goes on with as many as there are
        self.reserved: int | None = None  #: tokens of the prefix reserved for it, if any
        self.sources: dict[Key, int] = {}  #: the tier that delivered the key to it
        self.waits_since: float | None = None  #: for tiers
        self.waited_s = 0.0  #: for tiers, in waits that have ended
        self.loaded_tokens: dict[int, int] = {}  #: by source
        self.missed: tuple[int, AbsenceReason] | None = None  #: source and reason, last
        self.was_missed = False  #: whether the end of its stored prefix is counted, in this wait
        # Invariant: a key is in one of these from its first lookup on, and never changes sides.
        #            Checked: count, a_key_counts_once_for_a_request_as_a_hit_or_as_a_miss.
        # Each lookup keeps to it, in line. Otherwise counts would have to be taken back, and
        # vLLM ends the engine for a counter that falls.
        self.hits: set[Key] = set()  #: keys that were READY when first looked up
        self.misses: set[Key] = set()  #: keys that were not; they may be READY later
        self._queries_counted = 0
        self._hits_counted = 0

    def reserve(self, tokens: int) -> None:
        """Record that a prefix of ``tokens`` is reserved; ``REFUSED`` if there was no room."""
        assert self.reserved is None, "a request reserves once until its decision has ended"
        self.stop_waiting()
        self.reserved = tokens

    def mark_decided(self) -> None:
        """Note that its split of loading and computing is decided, for as long as it waits."""
        self.is_weighed = True

    def wait_for_loads(self, seconds: float, at_most: float) -> None:
        """Note how long it waits for a load, from when that is sent; see ``m.Promote``."""
        self.patience_s = seconds
        self.patience_max_s = at_most

    def wait_for_room(self, slots: int, until: float) -> None:
        """Have it begin to load once promotions may take ``slots``, or at ``until``."""
        self.has_waited = False
        self.room_wanted = slots
        self.room_until = until

    def begin_to_wait(self) -> bool:
        """Note that it waits for room; return whether it did not wait before."""
        had, self.has_waited = self.has_waited, True
        return not had

    def stop_waiting(self) -> None:
        """Note that it goes on with as many slots as there are."""
        self.room_wanted = 0

    def end_reservation(self) -> None:
        """Let it reserve again, and make a new decision."""
        self.stop_waiting()
        self.reserved = None
        self.is_weighed = self.was_missed = False
        self.patience_s = self.patience_max_s = NEVER

    def wait_for_tiers(self, now: float) -> None:
        """Note that it waits for tiers."""
        if self.waits_since is None:
            self.waits_since = now

    def mark_missed(self) -> bool:
        """Note that its stored prefix ends; return whether that is new in this wait."""
        before, self.was_missed = self.was_missed, True
        return not before

    def end_wait(self, now: float) -> float | None:
        """Note that it no longer waits for tiers; return for how long it did, None: it did not."""
        if self.waits_since is None:
            return None
        seconds = max(0.0, now - self.waits_since)
        self.waits_since = None
        self.waited_s += seconds
        return seconds

    def load(self, tokens: Mapping[int, int]) -> None:
        """Note how many tokens it loads from each source."""
        for source, count in tokens.items():
            self.loaded_tokens[source] = self.loaded_tokens.get(source, 0) + count

    def miss(self, source: int, reason: AbsenceReason) -> None:
        """Note why its stored prefix ends."""
        self.missed = source, reason

    def report(self) -> RequestReport:
        """Return its loads, its waits and its latest miss."""
        return RequestReport(self.loaded_tokens.copy(), self.waited_s, self.missed)

    def delivered(self, key: Key, tier: int) -> None:
        """Note which tier delivered a key to it."""
        self.sources[key] = tier

    def reset(self) -> None:
        """Forget all that belongs to blocks from before a reset."""
        self.sources.clear()
        self.end_reservation()

    def count(self, counts: PrimaryCounts) -> None:
        """Add the keys looked up since the last time to the counts, each key once a request.

        Done when a request loads, stores or ends, since a lookup has no time for it.
        """
        hits = len(self.hits)
        queries = hits + len(self.misses)
        assert hits >= self._hits_counted, "a hit that was counted is none any more"
        assert queries >= self._queries_counted, "a key that was counted was not looked up"
        counts.queries += queries - self._queries_counted
        counts.hits += hits - self._hits_counted
        self._queries_counted = queries
        self._hits_counted = hits


class GpuLoads:
    """Counts how often each request is loading each key."""

    def __init__(self) -> None:
        self._under_way: dict[RequestId, dict[Key, int]] = {}

    def begin(self, request: RequestId, keys: Sequence[Key]) -> None:
        """Note that the GPU begins to read ``keys``."""
        loads = self._under_way.get(request)
        once = dict.fromkeys(keys, 1)
        if loads is None and len(once) == len(keys):
            self._under_way[request] = once  # the usual case: in a tenth of the time
            return
        loads = self._under_way.setdefault(request, {})
        for key in keys:
            loads[key] = loads.get(key, 0) + 1

    def end(self, request: RequestId, keys: Sequence[Key]) -> Sequence[Key]:
        """Note that the GPU has read ``keys``; return those that it had begun to read."""
        loads = self._under_way.get(request)
        if loads is None:
            return []
        if len(loads) == len(keys) and loads == dict.fromkeys(keys, 1):
            del self._under_way[request]  # all that it loads: the usual case
            return keys
        ended = []
        for key in keys:
            count = loads.get(key)
            if count is None:
                continue
            if count > 1:
                loads[key] = count - 1
            else:
                del loads[key]
            ended.append(key)
        if not loads:
            del self._under_way[request]
        return ended

    def reset(self, slot_of: Mapping[Key, int]) -> dict[int, int]:
        """Forget all loads: a new epoch begins. Return their number for each slot."""
        reads: dict[int, int] = {}
        for loads in self._under_way.values():
            for key, count in loads.items():
                slot = slot_of[key]
                reads[slot] = reads.get(slot, 0) + count
        self._under_way.clear()
        return reads
