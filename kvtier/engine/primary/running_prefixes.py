"""Tracks the prefixes of running requests, so that tails are evicted before heads.

A block is of no use without those before it. Eviction policies learn the order of a
request's blocks for certain only when it ends, and see a shared head as another request's.
So the order of a running request is kept here, and a block of it is evicted only
after all evictable blocks behind it: a victim that has any is replaced by a stand-in.

# Invariant: no block of a running request is evicted while an evictable block behind it stays.
#            Checked: stand_in, p18_while_a_request_runs_its_tail_goes_before_its_head.

Costs: without evictions, only a reference to each call's keys is kept.
An eviction adds each running request's keys once to one set, and looks up its victims there.
Only a victim that is found there is searched for in the requests' orders. Keys of
ended requests stay in the set until they are half of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvtier.core.messages import RequestOrder
    from kvtier.plugin_api.keys import Key, RequestId

UNMERGED_CHAINS_MAX: Final = 8
"""Limit on calls whose keys are kept unmerged, for a request whose order was not reported."""


class _Prefix:
    """One running request's keys, from head to tail, resident or not."""

    __slots__ = ("_chains", "_cursor", "_eviction", "_place", "_uncounted", "counted", "order")

    def __init__(self) -> None:
        self.order: list[Key] = []
        self.counted = 0  #: how many keys ``uncounted`` has returned
        self._uncounted: list[Collection[Key]] = []
        self._chains: list[tuple[Key, ...]] | None = []  # not in ``order`` yet; None: it is known
        self._place: dict[Key, int] = {}  # in ``order``; made when it is needed
        self._eviction = -1
        self._cursor = -1  # in this eviction no block behind it can go

    @property
    def is_known(self) -> bool:
        """Whether a caller that knows the order has reported it."""
        return self._chains is None

    def learn(self, order: RequestOrder) -> None:
        """Apply a part of the order, from a caller that knows it."""
        if self._chains is not None:
            self._chains = None
            self.order.clear()
        if order.first < len(self.order):
            self._place.clear()
        self.order[order.first :] = order.keys
        self._uncounted.append(order.keys)

    def follow(self, chain: tuple[Key, ...]) -> None:
        """Add keys that a call brought, from head to tail."""
        if self._chains is not None:
            self._chains.append(chain)
            if len(self._chains) > UNMERGED_CHAINS_MAX:
                self._merge()

    def uncounted(self) -> list[Collection[Key]]:
        """Return the keys that were not returned before."""
        self._merge()
        keys, self._uncounted = self._uncounted, []
        self.counted += sum(map(len, keys))
        return keys

    def count_anew(self) -> None:
        """Have ``uncounted`` return all keys."""
        self._merge()
        self.counted = 0
        self._uncounted = [self.order.copy()]

    def _merge(self) -> None:
        """Insert the calls' new keys before the next known key of their chain, else last."""
        for chain in self._chains or ():
            place = self.place()
            new = dict.fromkeys(key for key in chain if key not in place)
            if not new:
                continue
            self._uncounted.append(new)
            if chain[-1] in new and place.keys().isdisjoint(chain[: -len(new)]):
                self.order += new
                continue
            before: dict[Key, list[Key]] = {}
            waiting: list[Key] = []
            for key in dict.fromkeys(chain):
                if key in new:
                    waiting.append(key)
                elif waiting:
                    before[key] = waiting
                    waiting = []
            self.order = [each for key in self.order for each in (*before.get(key, ()), key)]
            self.order += waiting
            self._place.clear()
        if self._chains:
            self._chains.clear()

    def place(self) -> dict[Key, int]:
        """Return where in ``order`` each key is."""
        known = len(self._place)
        if known < len(self.order):
            self._place.update(zip(self.order[known:], range(known, len(self.order)), strict=True))
        return self._place

    def known_place(self) -> dict[Key, int]:
        """Return where each key is, including keys that recent calls have brought."""
        self._merge()
        return self.place()

    def last_behind(self, key: Key, can_go: Callable[[Key], bool], eviction: int) -> Key | None:
        """Return the last block behind ``key`` that can go, if any.

        A block that can't go can't go for the whole eviction, so each one is checked once.
        """
        if self._eviction != eviction:
            self._eviction = eviction
            self._cursor = len(self.order) - 1
        place = self.place()[key]
        while self._cursor > place:
            if can_go(self.order[self._cursor]):
                return self.order[self._cursor]
            self._cursor -= 1
        return None


class RunningPrefixes:
    """The orders of all running requests. Part of the primary tier's actor."""

    def __init__(self) -> None:
        self._prefix_of: dict[RequestId, _Prefix] = {}
        self._changed: dict[RequestId, _Prefix] = {}  # those with keys that are not in _keys yet
        self._keys: set[Key] = set()  # of running requests, and of some that ended
        self._running_count = 0  # keys in _keys, counted once a request
        self._ended_count = 0
        self._evictions = 0

    def start(self, request: RequestId) -> None:
        """Begin a request."""
        self._prefix_of[request] = _Prefix()

    def end(self, request: RequestId) -> None:
        """Forget a request."""
        prefix = self._prefix_of.pop(request, None)
        if prefix is None:
            return
        self._changed.pop(request, None)
        self._running_count -= prefix.counted
        self._ended_count += prefix.counted
        if self._ended_count > self._running_count:
            self._keys.clear()
            self._running_count = self._ended_count = 0
            for each in self._prefix_of.values():
                each.count_anew()
            self._changed = self._prefix_of.copy()

    def use(
        self, request: RequestId, keys: tuple[Key, ...], order: RequestOrder | None = None
    ) -> None:
        """Note that a request loads, stores or touches ``keys``, and its order if known."""
        prefix = self._prefix_of.get(request)
        if prefix is None:
            return
        if order is not None:
            prefix.learn(order)
        elif prefix.is_known:
            return
        else:
            prefix.follow(keys)
        self._changed[request] = prefix

    def before(self, request: RequestId, keys: Sequence[Key]) -> list[Key | None]:
        """Return the key before each of ``keys``, given from head to tail, in their request."""
        before = [None, *keys[:-1]]
        prefix = self._prefix_of.get(request)
        if prefix is not None:
            order, place = prefix.order, prefix.known_place()
            for number, key in enumerate(keys):
                at = place.get(key)
                if at is not None:
                    before[number] = order[at - 1] if at else None
        return before

    def from_head_to_tail(
        self, request: RequestId, rows: list[tuple[Key, int, Key | None]]
    ) -> list[tuple[Key, int, Key | None]]:
        """Return rows in the order that their keys, the first item of each, have in their request.

        Keys that were not reported go last.
        """
        prefix = self._prefix_of.get(request)
        if prefix is None:
            return rows
        place = prefix.known_place()
        return sorted(rows, key=lambda row: place.get(row[0], len(place)))

    def begin_eviction(self, victims: Collection[Key]) -> bool:
        """Start an eviction; return whether any victim may belong to a running request."""
        self._evictions += 1
        for prefix in self._changed.values():
            counted = prefix.counted
            for keys in prefix.uncounted():
                self._keys.update(keys)
            self._running_count += prefix.counted - counted
        self._changed.clear()
        return not self._keys.isdisjoint(victims)

    def stand_in(self, victim: Key, can_go: Callable[[Key], bool]) -> Key:
        """Return the block to evict instead of ``victim``: one without evictable blocks behind it.

        That may be ``victim`` itself. Each step leads further behind. Contradictory orders of
        several callers could form a cycle, so no block is visited twice.
        """
        seen = {victim}
        while victim in self._keys:
            behind = self._behind(victim, can_go, seen)
            if behind is None:
                break
            victim = behind
            seen.add(victim)
        assert len(seen) == 1 or can_go(victim), "the stand-in has to stay"
        return victim

    def _behind(self, victim: Key, can_go: Callable[[Key], bool], seen: set[Key]) -> Key | None:
        for prefix in self._prefix_of.values():
            if victim in prefix.place():
                behind = prefix.last_behind(victim, can_go, self._evictions)
                if behind is not None and behind not in seen:
                    return behind
        return None
