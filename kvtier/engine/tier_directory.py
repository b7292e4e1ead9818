"""Which secondary tier has a block, as far as the engine cell knows.

Three sources, in this order: what a running request was told when it asked
(its *verdict*, which holds until the request ends, so that no key is asked
for twice by one request); what tiers said of their own accord (*known*); and
asking them (*probes*, collected during a step and sent at its end).

A tier that failed to deliver a key to a request isn't asked for that key by
that request again. So each request waits at most once for each tier, and
``lookup()``'s None ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kvtier.plugin_api.keys import GROUP_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtier.plugin_api.keys import Key, RequestId, TierSet

NOWHERE: Final = -1
"""No tier that the request may use has the key."""

ASKING: Final = -2
"""Tiers are being asked."""


class Search:
    """What one running request has been told."""

    __slots__ = ("asked", "failed", "gaps", "request", "tiers", "verdicts")

    def __init__(self, request: RequestId, tiers: TierSet) -> None:
        self.request = request
        self.tiers = tiers  # the tiers it may be served from
        self.verdicts: dict[Key, TierSet] = {}
        self.failed: dict[Key, TierSet] = {}
        self.gaps: set[bytes] = set()  # groups in which a key of this step is PROBING
        self.asked: list[Key] = []  # keys whose probes it waits for, or did


class _Probe(Struct, gc=False):
    """One key that tiers are being asked for, all at once."""

    asked: TierSet
    pending: TierSet
    waiters: set[RequestId]
    found: TierSet = 0


@dataclass(frozen=True)
class DirectoryAudit:
    """Where blocks are said to be, and who asks."""

    known: Mapping[Key, TierSet]
    waiters: Mapping[Key, frozenset[RequestId]]  #: of each key that tiers are asked for
    unsent: frozenset[Key]
    requests: frozenset[RequestId]


class TierDirectory:
    """Finds the first tier, in configuration order, that has a key. Holds no bytes."""

    def __init__(self, tier_count: int, known_keys_max: int) -> None:
        self._tier_count = tier_count
        self._known_keys_max = known_keys_max
        self._usable: TierSet = (1 << tier_count) - 1
        self._known: dict[Key, TierSet] = {}
        self._searches: dict[RequestId, Search] = {}
        self._probes: dict[Key, _Probe] = {}
        self._unsent: list[list[Key]] = [[] for _ in range(tier_count)]
        self._with_gaps: list[Search] = []

    def start(self, request: RequestId, tiers: TierSet) -> Search:
        """Begin a request that may be served from ``tiers``; return what ``find`` needs."""
        search = self._searches[request] = Search(request, tiers)
        return search

    def end(self, request: RequestId) -> None:
        """Forget what the request was told."""
        self.stop_waiting(request)
        self._searches.pop(request, None)

    def stop_waiting(self, request: RequestId) -> None:
        """Note that the request waits for no probe any more. What is not sent yet is not asked."""
        search = self._searches.get(request)
        if search is None or not search.asked:
            return
        for key in search.asked:
            probe = self._probes.get(key)
            if probe is not None:
                probe.waiters.discard(request)
        search.asked = []

    def find(self, key: Key, search: Search) -> int:
        """Return a tier's number to promote from, ``NOWHERE``, or ``ASKING``.

        ``ASKING`` also where a tier has the key, but a key before it in this
        step and group is being asked for: only a contiguous prefix is promoted.
        """
        allowed = search.tiers & self._usable
        if search.failed:
            allowed &= ~search.failed.get(key, 0)
        if not allowed:
            return NOWHERE
        verdict = search.verdicts.get(key)
        having = allowed & (self._known.get(key, 0) if verdict is None else verdict)
        if having:
            if search.gaps and key[-GROUP_BYTES:] in search.gaps:
                return ASKING
            return (having & -having).bit_length() - 1
        if verdict is not None:
            return NOWHERE
        self._ask(key, search, allowed)
        if not search.gaps:
            self._with_gaps.append(search)
        search.gaps.add(key[-GROUP_BYTES:])
        return ASKING

    def stop_probing(self, keys: Iterable[Key]) -> None:
        """Expect no answer for ``keys`` any more: they are being filled."""
        if self._probes:
            for key in keys:
                self._probes.pop(key, None)

    def answered(self, tier: int, keys: Sequence[Key], present: Sequence[bool]) -> None:
        """Take one tier's answers. What nobody waits for any more is ignored."""
        bit = 1 << tier
        for key, found in zip(keys, present, strict=True):
            probe = self._probes.get(key)
            if probe is None or not probe.pending & bit:
                continue
            probe.pending &= ~bit
            if found:
                probe.found |= bit
            if probe.pending and not self._is_settled(probe):
                continue
            del self._probes[key]
            for waiter in probe.waiters:
                search = self._searches.get(waiter)
                if search is not None:
                    search.verdicts[key] = probe.found

    def _is_settled(self, probe: _Probe) -> bool:
        """Tell whether the answers still owed can't matter to anybody who waits.

        A slow last tier then holds up nobody. It is not asked again should the
        tier that has the key fail to deliver it: the block is recomputed.
        """
        first = probe.found & -probe.found
        if not first or probe.pending & (first - 1):
            return False
        searches = (self._searches.get(waiter) for waiter in probe.waiters)
        return all(search is None or search.tiers & first for search in searches)

    def failed(self, key: Key, request: RequestId, tier: int) -> None:
        """Note that the tier did not deliver the key."""
        self._unlearn(key, 1 << tier)
        search = self._searches.get(request)
        if search is not None:
            search.failed[key] = search.failed.get(key, 0) | 1 << tier

    def learn(self, tier: int, added: Sequence[Key], removed: Sequence[Key]) -> None:
        """Take what a tier says of its contents, gains before losses."""
        bit = 1 << tier
        known = self._known
        for key in added:
            known[key] = known.get(key, 0) | bit
        for key in removed:
            self._unlearn(key, bit)
        # Forgetting is harmless: the tier is then asked. The oldest go first.
        while len(known) > self._known_keys_max:
            del known[next(iter(known))]

    def forget_all(self) -> None:
        """Forget what is known of all tiers, and what running requests were told."""
        self._known.clear()
        for search in self._searches.values():
            search.verdicts.clear()

    def forget_tier(self, tier: int) -> None:
        """Forget what is known of a tier that was restarted."""
        for key in [key for key, tiers in self._known.items() if tiers >> tier & 1]:
            self._unlearn(key, 1 << tier)

    def set_usable(self, tier: int, *, usable: bool) -> None:
        """Ask the tier for nothing while it is not usable."""
        if usable:
            self._usable |= 1 << tier
        else:
            self._usable &= ~(1 << tier)

    def give_up(self, tier: int) -> None:
        """Take every answer that the tier still owes as a no: it can't be asked any more."""
        self._unsent[tier] = []
        owed = [key for key, probe in self._probes.items() if probe.pending >> tier & 1]
        self.answered(tier, owed, (False,) * len(owed))

    def pop_unsent(self) -> dict[int, list[Key]]:
        """Return the keys to ask each tier for, and forget that they are unsent."""
        unsent: dict[int, list[Key]] = {}
        for tier, keys in enumerate(self._unsent):
            if keys:
                self._unsent[tier] = []
                wanted = [key for key in keys if self._is_wanted(key, 1 << tier)]
                if wanted:
                    unsent[tier] = wanted
        return unsent

    def _is_wanted(self, key: Key, bit: TierSet) -> bool:
        """Tell whether a request still waits for this tier's answer; if not, expect none."""
        probe = self._probes.get(key)
        if probe is None:
            return False
        if probe.waiters:
            return True
        probe.asked &= ~bit
        probe.pending &= ~bit
        if not probe.pending:
            del self._probes[key]
        return False

    def end_step(self) -> None:
        """Let the next step promote behind this step's gaps."""
        for search in self._with_gaps:
            search.gaps.clear()
        self._with_gaps.clear()

    def reset(self) -> None:
        """Forget all probes; late answers will be ignored. Tiers keep what they have."""
        self._probes.clear()
        self._unsent = [[] for _ in self._unsent]
        for search in self._searches.values():
            search.failed.clear()
            search.asked = []

    def audit(self) -> DirectoryAudit:
        """Return all that is kept here, frozen. For tests and diagnosis: it costs O(n)."""
        return DirectoryAudit(
            known=self._known.copy(),
            waiters={key: frozenset(probe.waiters) for key, probe in self._probes.items()},
            unsent=frozenset().union(*self._unsent),
            requests=frozenset(self._searches),
        )

    def _ask(self, key: Key, search: Search, allowed: TierSet) -> None:
        request = search.request
        probe = self._probes.get(key)
        if probe is None:
            self._probes[key] = _Probe(allowed, allowed, {request})
            search.asked.append(key)
            unasked = allowed
        else:
            if request not in probe.waiters:
                probe.waiters.add(request)
                search.asked.append(key)
            unasked = allowed & ~probe.asked
            if not unasked:
                return
            probe.asked |= unasked
            probe.pending |= unasked
        for tier in range(self._tier_count):
            if unasked >> tier & 1:
                self._unsent[tier].append(key)

    def _unlearn(self, key: Key, bit: TierSet) -> None:
        tiers = self._known.get(key, 0) & ~bit
        if tiers:
            self._known[key] = tiers
        else:
            self._known.pop(key, None)
