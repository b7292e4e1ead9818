"""Tracks which secondary tiers have a block, as far as the engine cell knows.

It has three sources, in this order: the answer that a running request got to its probe
(its *verdict*, which holds until the request ends, so that no request probes for
a key twice); presence that tiers have reported by themselves (*known*); and
*probes*, collected during a step and sent at its end.

A probe is for all requests that want the key. The answer of a request-scoped tier
to one request does not hold for another: a request with parameters for such a tier
has its own probes.

A tier that failed to deliver a key to a request isn't asked for that key by
that request again. So each request waits at most once for each tier, and
``lookup()``'s None ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from kvtier.core import messages as m
from kvtier.engine.decide.load_decision import ASKING, NOWHERE
from kvtier.plugin_api.keys import GROUP_BYTES, forget_oldest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvtier.core.statistics import AbsenceReason
    from kvtier.plugin_api.keys import Key, RequestId, TierSet

_ALL: Final = -1  # tiers


class Search:
    """The answers and failures of one running request."""

    __slots__ = (
        "_failed",
        "asked",
        "failed",
        "gaps",
        "in_order",
        "probes",
        "request",
        "tiers",
        "verdicts",
    )

    def __init__(self, request: RequestId, tiers: TierSet, probes: _Probes) -> None:
        self.request = request
        self.tiers = tiers  # the tiers it may be served from
        self.probes = probes  # shared with other requests, or its own
        self.verdicts: dict[Key, TierSet] = {}
        self.failed: dict[Key, TierSet] = {}  # including those that it declines
        self._failed = self.failed  # without those that it declines
        self.gaps: set[bytes] = set()  # groups in which a key of this step is PROBING
        self.asked: list[Key] = []  # keys whose probes it waits for, or has waited for
        self.in_order = False  # it has one full-attention group: no key is of use behind a gap

    def ask_in_order(self) -> None:
        """Note that its keys are of no use behind a missing one."""
        self.in_order = True

    def fail(self, key: Key, bit: TierSet) -> None:
        """Note that a tier did not deliver a key to it."""
        self._failed[key] = self._failed.get(key, 0) | bit
        if self.failed is not self._failed:
            self.failed[key] = self.failed.get(key, 0) | bit

    def decline(self, keys: Iterable[Key]) -> None:
        """Serve these keys from no tier: the request computes them instead."""
        self.failed = {**self.failed, **dict.fromkeys(keys, _ALL)}

    def end_decline(self) -> None:
        """Serve it the declined keys again."""
        self.failed = self._failed

    def declined(self) -> frozenset[Key]:
        """Return the keys that it declines. For tests and diagnosis."""
        return frozenset(key for key, tiers in self.failed.items() if tiers == _ALL)

    def clear(self) -> None:
        """Forget failed and declined keys."""
        self._failed.clear()
        self.failed = self._failed


class _Probe(Struct, gc=False):
    """The probes for one key, at all its tiers at once."""

    asked: TierSet
    pending: TierSet
    waiters: set[RequestId]
    found: TierSet = 0


class _Probes:
    """The probes of all requests together, or of one that tiers answer apart from others."""

    __slots__ = ("of", "unsent")

    def __init__(self, tier_count: int) -> None:
        self.of: dict[Key, _Probe] = {}
        # Of each tier, by the request that asked first.
        self.unsent: list[dict[RequestId, list[Key]]] = [{} for _ in range(tier_count)]

    def stop(self, keys: Iterable[Key]) -> None:
        """Expect no answer for ``keys`` any more."""
        if self.of:
            for key in keys:
                self.of.pop(key, None)

    def reset(self) -> None:
        """Forget all probes; late answers will be ignored."""
        self.of.clear()
        self.unsent = [{} for _ in self.unsent]

    def pop_unsent(self) -> Iterator[tuple[int, RequestId, list[Key]]]:
        """Yield tier, first asker and keys of unsent probes; they count as sent then."""
        for tier, asked in enumerate(self.unsent):
            if asked:
                self.unsent[tier] = {}
                for asker, keys in asked.items():
                    wanted = [key for key in keys if self._is_wanted(key, 1 << tier)]
                    if wanted:
                        yield tier, asker, wanted

    def ask(self, key: Key, tiers: TierSet, asker: RequestId) -> None:
        """Have these tiers probed for a key at the end of the step."""
        for tier, asked in enumerate(self.unsent):
            if tiers >> tier & 1:
                asked.setdefault(asker, []).append(key)

    def withdrawn(self, tier: int, keys: Iterable[Key]) -> None:
        """Drop unsent probes of a tier, or ask again if a request still waits for them."""
        bit = 1 << tier
        for key in keys:
            probe = self.of.get(key)
            if probe is None or not probe.pending & bit:
                continue
            if probe.waiters:
                self.ask(key, bit, next(iter(probe.waiters)))
                continue
            probe.asked &= ~bit
            probe.pending &= ~bit
            if not probe.pending:
                del self.of[key]

    def _is_wanted(self, key: Key, bit: TierSet) -> bool:
        """Return whether a request still waits for this tier's answer; if not, expect none."""
        probe = self.of.get(key)
        if probe is None:
            return False
        if probe.waiters:
            return True
        probe.asked &= ~bit
        probe.pending &= ~bit
        if not probe.pending:
            del self.of[key]
        return False


@dataclass(frozen=True)
class DirectoryAudit:
    """A snapshot of known blocks, and of the requests that wait for probes."""

    known: Mapping[Key, TierSet]
    waiters: Mapping[Key, frozenset[RequestId]]  #: of each key that tiers are probed for
    settled: frozenset[Key]  #: keys with verdicts; later tiers may still owe an answer
    unsent: frozenset[Key]
    requests: frozenset[RequestId]
    declined: Mapping[RequestId, frozenset[Key]]  #: keys that requests compute rather than load


class TierDirectory:
    """Finds the first tier, in configuration order, that has a key. Holds no bytes."""

    def __init__(self, tier_count: int, directory_keys_max: int) -> None:
        self._tier_count = tier_count
        self._directory_keys_max = directory_keys_max
        self._usable: TierSet = (1 << tier_count) - 1
        self._answering: TierSet = self._usable
        self._known: dict[Key, TierSet] = {}
        self._searches: dict[RequestId, Search] = {}
        self._shared = _Probes(tier_count)
        self._apart: dict[RequestId, _Probes] = {}  # of requests that tiers answer apart
        self._with_gaps: list[Search] = []

    def handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        """Return the handler of each message type that the primary tier delegates to this."""
        return {
            m.ProbeEnded: lambda x: self.answered(x.tier, x.keys, x.present, x.request),
            m.ProbesWithdrawn: lambda x: self._probes_of(x.request).withdrawn(x.tier, x.keys),
            m.TierUsable: lambda x: self.set_usable(x.tier, usable=x.usable, answers=x.answers),
            m.TierForgotten: lambda x: self.forget_tier(x.tier),
        }

    def start(self, request: RequestId, tiers: TierSet, *, apart: bool = False) -> Search:
        """Begin a request that may be served from ``tiers``; return its search for ``find``.

        ``apart``: tiers' contents depend on the request, so it shares no answer with others.
        """
        probes = self._shared
        if apart:
            probes = self._apart[request] = _Probes(self._tier_count)
        search = self._searches[request] = Search(request, tiers, probes)
        return search

    def end(self, request: RequestId) -> None:
        """Forget the request, and the answers it got."""
        self.stop_waiting(request)
        self._searches.pop(request, None)
        self._apart.pop(request, None)

    def stop_waiting(self, request: RequestId) -> frozenset[Key]:
        """Note that the request no longer waits. Its unsent probes are not sent.

        It may load keys that it declined when it waits again. Returns the keys without waiters
        that tiers may have been asked for.
        """
        search = self._searches.get(request)
        if search is None:
            return frozenset()
        search.end_decline()
        if not search.asked:
            return frozenset()
        unwanted = []
        for key in search.asked:
            probe = search.probes.of.get(key)
            if probe is not None:
                probe.waiters.discard(request)
                if not probe.waiters:
                    unwanted.append(key)
        search.asked = []
        return frozenset(unwanted)

    def find(self, key: Key, search: Search) -> int:
        """Return a tier's number to promote from, ``NOWHERE``, or ``ASKING``.

        ``ASKING`` also if a tier has the key, but a key before it in this
        step and group is being probed for: only a contiguous prefix is promoted.
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
            return (having & -having).bit_length() - 1  # the lowest bit: the first tier
        asked = allowed & self._answering
        if verdict is not None or not asked:
            return NOWHERE
        self._ask(key, search, asked)
        if not search.gaps:
            self._with_gaps.append(search)
        search.gaps.add(key[-GROUP_BYTES:])
        return ASKING

    def seen_at(self, key: Key, search: Search) -> int:
        """Return the tier that ``find`` would name or probe first, or ``NOWHERE``. Probes none."""
        having, asked = self._having(key, search)
        seen = having or asked  # as if it had the key
        return (seen & -seen).bit_length() - 1 if seen else NOWHERE

    def is_known(self, key: Key, search: Search) -> bool:
        """Return whether ``find`` would not have to probe for the key."""
        having, asked = self._having(key, search)
        return bool(having) or not asked

    def _having(self, key: Key, search: Search) -> tuple[TierSet, TierSet]:
        """Return the tiers that have the key for the request, and those that would be asked."""
        allowed = search.tiers & self._usable
        if search.failed:
            allowed &= ~search.failed.get(key, 0)
        verdict = search.verdicts.get(key)
        if verdict is not None:
            return allowed & verdict, 0
        return allowed & self._known.get(key, 0), allowed & self._answering

    def absence_of(self, key: Key, search: Search) -> tuple[int, AbsenceReason] | None:
        """Return why a key is sought at no tier, if that is known: the source and the reason."""
        declined = search.failed.get(key, 0)
        if declined == _ALL:
            return 0, "recomputed"
        down = search.tiers & ~self._usable & ((1 << self._tier_count) - 1)
        if down and not declined & down:
            return (down & -down).bit_length(), "tier_down"
        return None

    def is_apart(self, request: RequestId) -> bool:
        """Return whether tiers answer the request apart from others."""
        return request in self._apart

    def stop_probing(self, keys: Iterable[Key]) -> None:
        """Expect no answer for ``keys`` any more: they are being filled."""
        self._shared.stop(keys)
        for probes in self._apart.values():
            probes.stop(keys)

    def answered(
        self, tier: int, keys: Sequence[Key], present: Sequence[bool], request: RequestId = ""
    ) -> None:
        """Apply one tier's answers. Answers without waiters are ignored.

        ``request``: the one they are for, if it is answered apart.
        """
        self._settle(tier, self._probes_of(request), keys, present)

    def _probes_of(self, request: RequestId) -> _Probes:
        """Return the shared probes; or those of a request that is answered apart, if it runs."""
        return self._apart.get(request, _Probes(0)) if request else self._shared

    def _settle(
        self, tier: int, probes: _Probes, keys: Sequence[Key], present: Sequence[bool]
    ) -> None:
        bit = 1 << tier
        for key, found in zip(keys, present, strict=True):
            probe = probes.of.get(key)
            if probe is None or not probe.pending & bit:
                continue
            probe.pending &= ~bit
            if found:
                probe.found |= bit
            if probe.pending and not self._is_settled(probe):
                continue
            del probes.of[key]
            for waiter in probe.waiters:
                search = self._searches.get(waiter)
                if search is not None:
                    search.verdicts[key] = probe.found

    def _is_settled(self, probe: _Probe) -> bool:
        """Return whether the outstanding answers can't matter to any waiting request.

        So a slow last tier does not hold up requests. It is not asked again if the
        tier that has the key fails to deliver it: the block is recomputed.
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
            search.fail(key, 1 << tier)

    def learn(self, tier: int, added: Sequence[Key], removed: Sequence[Key]) -> None:
        """Apply the contents that a tier has reported, gains before losses."""
        bit = 1 << tier
        known = self._known
        for key in added:
            known[key] = known.get(key, 0) | bit
        for key in removed:
            self._unlearn(key, bit)
        forget_oldest(known, self._directory_keys_max)  # harmless: the tier is then probed

    def forget_all(self) -> None:
        """Forget the known keys of all tiers, and the verdicts of running requests."""
        self._known.clear()
        for search in self._searches.values():
            search.verdicts.clear()

    def forget_tier(self, tier: int) -> None:
        """Forget the known keys of a tier that was restarted."""
        for key in [key for key, tiers in self._known.items() if tiers >> tier & 1]:
            self._unlearn(key, 1 << tier)

    def knows(self, key: Key, tier: int) -> bool:
        """Return whether the tier has reported that it has the key."""
        return bool(self._known.get(key, 0) >> tier & 1)

    def set_usable(self, tier: int, *, usable: bool, answers: bool = True) -> None:
        """Promote nothing from the tier while it is not usable, and probe it if it ``answers``."""
        bit = 1 << tier
        self._usable = self._usable | bit if usable else self._usable & ~bit
        self._answering = self._answering | bit if answers else self._answering & ~bit

    def give_up(self, tier: int) -> None:
        """Count the tier's outstanding answers as misses: it can't be asked any more."""
        for probes in (self._shared, *self._apart.values()):
            probes.unsent[tier] = {}
            owed = [key for key, probe in probes.of.items() if probe.pending >> tier & 1]
            self._settle(tier, probes, owed, (False,) * len(owed))

    def pop_unsent(self) -> Iterator[tuple[int, RequestId, list[Key]]]:
        """Yield tier, first asker and keys of shared unsent probes; they count as sent then."""
        return self._shared.pop_unsent()

    def asks_in_order(self, request: RequestId) -> bool:
        """Return whether a request's keys are of no use behind a missing one."""
        search = self._searches.get(request)
        return search is not None and search.in_order

    def pop_unsent_apart(self) -> Iterator[tuple[RequestId, int, list[Key]]]:
        """Yield the unsent probes of requests answered apart; they count as sent then."""
        for request, probes in self._apart.items():
            for tier, _, keys in probes.pop_unsent():
                yield request, tier, keys

    def end_step(self) -> None:
        """Let the next step promote behind this step's gaps."""
        for search in self._with_gaps:
            search.gaps.clear()
        self._with_gaps.clear()

    def reset(self) -> None:
        """Forget all probes; late answers will be ignored. Known keys stay."""
        for probes in (self._shared, *self._apart.values()):
            probes.reset()
        for search in self._searches.values():
            search.clear()
            search.asked = []

    def audit(self) -> DirectoryAudit:
        """Return the whole state, frozen. For tests and diagnosis: it costs O(n)."""
        waiters: dict[Key, frozenset[RequestId]] = {}
        unsent: set[Key] = set()
        for probes in (self._shared, *self._apart.values()):
            for key, probe in probes.of.items():
                waiters[key] = waiters.get(key, frozenset()) | probe.waiters
            unsent.update(*(keys for asked in probes.unsent for keys in asked.values()))
        return DirectoryAudit(
            known=self._known.copy(),
            waiters=waiters,
            settled=frozenset().union(*(search.verdicts for search in self._searches.values())),
            unsent=frozenset(unsent),
            requests=frozenset(self._searches),
            declined={name: search.declined() for name, search in self._searches.items()},
        )

    def _ask(self, key: Key, search: Search, allowed: TierSet) -> None:
        request, probes = search.request, search.probes
        probe = probes.of.get(key)
        if probe is None:
            probes.of[key] = _Probe(allowed, allowed, {request})
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
        probes.ask(key, unasked, request)

    def _unlearn(self, key: Key, bit: TierSet) -> None:
        tiers = self._known.get(key, 0) & ~bit
        if tiers:
            self._known[key] = tiers
        else:
            self._known.pop(key, None)
