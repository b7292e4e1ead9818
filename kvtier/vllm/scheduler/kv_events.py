"""Translates the facade's event stream into vLLM's KV events: routers' indexes must stay correct.

vLLM's connector turns the events returned here into ``BlockStored`` and
``BlockRemoved``. With ``self_describing_kv_events`` it adds tokens and parents,
which it gets from requests: when a block is stored, and when a lookup finds
it (``OffloadingEventsTracker`` in
``vllm/distributed/kv_transfer/kv_connector/v1/offloading/events.py``). It
forgets them with the last place that a block was announced in. Routers drop
events without tokens. So this module does the following:

- Blocks that vLLM can't describe wait until it can: those that a tier has from
  before a restart wait until a request first looks them up, heads before tails.
- Each removal is announced as long as vLLM can still name all hashes of a block.
- Blocks lost by a reset or a tier's end are announced one by one. vLLM
  publishes ``AllBlocksCleared`` only if no request uses the GPU at that moment.
- If many blocks leave a tier, they are announced over several steps. A block stored again
  meanwhile is first announced as removed, and then as stored.

Routers (llm-d's, Dynamo's) track a block's medium and not its tier. So if two
tiers share a medium, a block that leaves one of them is announced for the other
once more. And a removal never mixes blocks that routers still have with blocks
that they dropped at the other tier's removal: Dynamo stops processing a removal
at the first block that it doesn't have.

llm-d drops a block whose parent it doesn't have. So a block that was announced
while its parent was nowhere, an orphan, is announced again once the parent is
somewhere (``scheduler/event_orphans.py``).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadingEvent

from kvtier.core.events import PRIMARY, EventKind
from kvtier.vllm.releases import HAS_METADATA_EVENTS
from kvtier.vllm.scheduler.event_orphans import Orphans

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from kvtier.core.events import Event

_NOTHING: Final = object()

AT_ONCE: Final = 512
"""At most this many blocks a step are announced as gone, or as found again. vLLM's tracker and the
rest take 5 to 10 us for each: if a tier's thread takes the GIL once, a step is below 10 ms."""

CHEAP_HASHES: Final = 4
"""A block of more hashes than this counts for proportionally more blocks."""

AGAIN_COST: Final = 16
"""The number of blocks that one announced again counts for: it takes three events by itself."""

DESCRIBED_RESULTS: Final = (
    (LookupResult.HIT, LookupResult.HIT_PENDING) if HAS_METADATA_EVENTS else (LookupResult.HIT,)
)
"""The lookup results after which vLLM's connector describes the block."""


class Place(NamedTuple):
    """A tier as named in an event. ``removals``: whether it will announce each removed block."""

    medium: Medium | None
    locality: Locality | None
    ownership: str | None
    removals: Callable[[], bool]


class _Contents:
    """The blocks of one tier, by whether they were announced to routers."""

    def __init__(self, place: Place) -> None:
        self.place = place
        # Dicts because they keep the order: heads come before tails.
        self.announced: dict[bytes, None] = {}
        self.waiting: dict[bytes, None] = {}  # resident; vLLM can't describe it yet
        self.withdrawn: dict[bytes, None] = {}  # gone or forgotten; to be announced as removed
        self.gone: set[bytes] = set()  # of those, blocks that routers lack in this medium

    def withdraw(self) -> None:
        """Withdraw all announced blocks."""
        self.withdrawn.update(self.announced)
        self.announced.clear()


class KVEvents:
    """Translates one engine's events. Scheduler thread only."""

    def __init__(
        self, tiers: Sequence[Place], *, self_describing: bool, hashes_a_block: int = 1
    ) -> None:
        """``hashes_a_block``: how many of vLLM's blocks, each with a hash, are in a block."""
        self._at_once = max(1, AT_ONCE * CHEAP_HASHES // max(CHEAP_HASHES, hashes_a_block))
        primary = Place(Medium.CPU, None, None, lambda: True)
        self._places = {
            number: _Contents(place) for number, place in enumerate([primary, *tiers], PRIMARY)
        }
        # The other tiers of the same medium.
        self._beside = {
            number: {
                other: theirs
                for other, theirs in self._places.items()
                if other != number and theirs.place.medium is contents.place.medium
            }
            for number, contents in self._places.items()
        }
        self._self_describing = self_describing
        # As in vLLM's tracker: the tiers for whose removals it keeps a block's description.
        self._described: dict[bytes, set[int]] = {}
        self._met: dict[bytes, None] = {}  # described since the last step
        self._doubtful: set[bytes] = set()  # announced again; a router without the head drops it
        self._orphans = Orphans(self._is_announced)
        self._out: list[OffloadingEvent] = []

    def describe(self, keys: Iterable[bytes], parents: Mapping[bytes, bytes]) -> None:
        """Note blocks that vLLM has described as being in the primary tier, or on the way there.

        These are blocks that ``prepare_store`` granted, or that a lookup found. ``parents``: the
        block before each block of the request, except the first one.
        """
        for key in keys:
            kept = self._described.get(key)
            if kept is None:
                self._described[key] = {PRIMARY}
                self._orphans.meet(key, parents.get(key))
                self._met[key] = None
            else:
                kept.add(PRIMARY)
                if key in self._doubtful:
                    self._met[key] = None

    def is_behind(self) -> bool:
        """Return whether removals are left that one step could not announce."""
        return any(contents.withdrawn for contents in self._places.values())

    def reset(self, events: Iterable[Event]) -> None:
        """Follow vLLM's reset, which forgets all descriptions. ``events``: all up to its end."""
        self._described.clear()
        self._met.clear()
        self._doubtful.clear()
        self._orphans.clear()
        for contents in self._places.values():
            contents.waiting |= contents.announced
            contents.withdraw()
        self._note(events)

    def drain(self, events: Collection[Event]) -> list[OffloadingEvent]:
        """Return the events to announce from ``events`` and from those that waited."""
        if not (events or self._out or self._met or self._waits()):
            return []  # as in most steps
        self._note(events)
        self._announce_waiting()
        self._announce_withdrawn()
        self._announce_undescribed()
        while (key := self._orphans.pop_adopted()) is not None:
            self._announce_again(key, self._places)
        out, self._out = self._out, []
        self._forget_undescribed(out)
        return out

    def _is_announced(self, key: bytes) -> bool:
        """Return whether the block has been announced to routers anywhere."""
        for contents in self._places.values():  # noqa: SIM110 - a loop takes half of the time
            if key in contents.announced:
                return True
        return False

    def _waits(self) -> bool:
        """Return whether a tier has unannounced blocks, or announced ones that are gone."""
        for contents in self._places.values():  # noqa: SIM110 - a loop takes half of the time
            if contents.waiting or contents.withdrawn:
                return True
        return False

    def _note(self, events: Iterable[Event]) -> None:
        for kind, keys, number in events:
            contents = self._places[number]
            if kind is EventKind.STORED:
                self._stored(number, _outside(keys, contents.announced.keys()))
            elif kind is EventKind.REMOVED:
                for key in _within(keys, contents.waiting):
                    contents.waiting.pop(key, None)
                self._removed(number, keys)
            elif kind is EventKind.LAPSED:
                self._lapsed(keys)
            else:
                contents.waiting.clear()
                contents.withdraw()

    def _stored(self, number: int, keys: Sequence[bytes]) -> None:
        """Announce the blocks that vLLM can describe; the rest waits."""
        contents = self._places[number]
        if self._self_describing:
            contents.waiting.update(dict.fromkeys(k for k in keys if k not in self._described))
            keys = [key for key in keys if key in self._described]
        # The removal first: a router that counts would take it for the new block's removal.
        self._emit_removed(number, _within(keys, contents.withdrawn))
        contents.announced.update(dict.fromkeys(keys))
        self._emit_stored(number, keys)

    def _removed(self, number: int, keys: Sequence[bytes]) -> None:
        """Announce that a tier has lost those of the blocks that it was announced to have."""
        announced = self._places[number].announced
        keys = [key for key in keys if announced.pop(key, _NOTHING) is None]
        self._doubtful.difference_update(_within(keys, self._doubtful))
        if number == PRIMARY:  # no more blocks than a step stores
            self._withdraw(number, keys)
        else:
            self._places[number].withdrawn.update(dict.fromkeys(keys))

    def _withdraw(self, number: int, keys: Sequence[bytes]) -> None:
        """Announce that blocks left a tier, and that other tiers of its medium have them."""
        others = self._beside[number]
        elsewhere = {key for theirs in others.values() for key in _within(keys, theirs.announced)}
        gone = _within(keys, self._places[number].gone)
        # One by one: tails go first, and a router accepts a block again only if it has the head.
        # So heads that are nowhere else leave after their tails are announced again.
        for key in _within(keys, elsewhere):
            self._emit_removed(number, [key])
            self._announce_again(key, others)
            self._doubtful.add(key)
        self._emit_removed(number, _outside(keys, elsewhere.union(gone)))
        self._emit_removed(number, gone)

    def _announce_again(self, key: bytes, places: Mapping[int, _Contents]) -> None:
        """Announce that a block is still in places from which routers have dropped it."""
        for number, contents in places.items():
            if key in contents.announced:
                del contents.announced[key]
                self._emit_removed(number, [key])
                self._stored(number, [key])

    def _lapsed(self, keys: Sequence[bytes]) -> None:
        """Make vLLM forget blocks that it has described and that never arrived."""
        place = self._places[PRIMARY].place
        keys = [key for key in keys if PRIMARY in self._described.get(key, ())]
        if HAS_METADATA_EVENTS:
            for key in keys:
                self._described[key].discard(PRIMARY)
            self._emit(place, keys, removed=True, metadata_only=True)
        else:  # both in one batch, so that no router sees the block in between
            self._emit(place, keys, removed=False, removal_expected=True)
            self._withdraw(PRIMARY, keys)

    def _announce_waiting(self) -> None:
        """Announce blocks that vLLM has become able to describe; without descriptions, all."""
        for number, contents in self._places.items():
            waiting = contents.waiting
            if waiting:
                ready: Iterable[bytes] = self._met if self._self_describing else waiting
                keys = list(islice((key for key in ready if key in waiting), self._at_once))
                for key in keys:
                    del waiting[key]
                self._stored(number, keys)
        for key in self._met:
            if key in self._doubtful:
                self._doubtful.discard(key)
                self._announce_again(key, self._places)
        self._met.clear()

    def _announce_withdrawn(self) -> None:
        """Announce blocks that are gone.

        A block on its way back into the primary tier is announced when it arrives: vLLM's tracker
        has described it already, and would forget it with the removal.
        """
        room = self._at_once
        for number, contents in self._places.items():
            keys = []
            for key in contents.withdrawn:
                if room <= 0:
                    break
                if number == PRIMARY and PRIMARY in self._described.get(key, ()):
                    continue
                keys.append(key)
                others = self._beside[number].values()
                is_elsewhere = any(key in theirs.announced for theirs in others)
                room -= AGAIN_COST if is_elsewhere else 1
            if keys:
                self._withdraw(number, keys)

    def _announce_undescribed(self) -> None:
        """Announce all removals of a block with its last one: vLLM forgets the block with that."""
        for number, contents in self._places.items():
            if contents.withdrawn:
                keys = [
                    key
                    for event in self._out
                    if event.removed
                    for key in _within(event.keys, contents.withdrawn)
                    if not self._described.get(key, {PRIMARY})
                ]
                self._withdraw(number, list(dict.fromkeys(keys)))

    def _forget_undescribed(self, out: Iterable[OffloadingEvent]) -> None:
        """Forget blocks that are nowhere any more, as vLLM's tracker does at a batch's end."""
        for event in out:
            if event.removed:
                for key in _within(event.keys, self._described):
                    if not self._described.get(key, {PRIMARY}):
                        del self._described[key]
                        self._orphans.forget(key)

    def _emit_stored(self, number: int, keys: Sequence[bytes]) -> None:
        place = self._places[number].place
        removals = place.removals()
        for theirs in self._beside[number].values():
            theirs.gone.difference_update(keys)
        if removals and self._self_describing:
            for key in keys:
                self._described[key].add(number)
        if self._self_describing:
            self._orphans.announced(keys)
        self._emit(place, keys, removed=False, removal_expected=removals)

    def _emit_removed(self, number: int, keys: Sequence[bytes]) -> None:
        contents = self._places[number]
        for key in _within(keys, contents.withdrawn):
            contents.withdrawn.pop(key, None)
        for key in _within(keys, self._described):
            self._described[key].discard(number)
        contents.gone.difference_update(_within(keys, contents.gone))
        for theirs in self._beside[number].values():
            theirs.gone.update(_within(keys, theirs.withdrawn))
        self._emit(contents.place, keys, removed=True)

    def _emit(self, place: Place, keys: Sequence[bytes], *, removed: bool, **more: bool) -> None:
        if not keys:
            return
        self._out.append(
            OffloadingEvent(
                keys=list(keys),
                medium=place.medium,
                removed=removed,
                locality=place.locality,
                ownership=place.ownership,
                **more,
            )
        )


def _within(keys: Iterable[bytes], those: Collection[bytes]) -> list[bytes]:
    """Return which of ``keys`` are among ``those``, which are often empty."""
    return [key for key in keys if key in those] if those else []


def _outside(keys: Sequence[bytes], those: AbstractSet[bytes]) -> Sequence[bytes]:
    """Return which of ``keys`` are not among ``those``: usually all."""
    return keys if those.isdisjoint(keys) else [key for key in keys if key not in those]
