"""Handles lookups and promotions of requests whose keys belong to several KV-cache groups.

Part of the primary tier's actor. A survey returns where blocks are, and promotes
none. Once the caller knows which blocks it needs, one reservation promotes
and leases all blocks of a prefix that fits the room. No more are promoted for
that request until its decision has ended. So a request holds all the blocks
that it waits for, or none, and two requests can't starve one another.

The plan of a reservation is the longest prefix of tokens, across KV-cache groups, that fits the
room. A model with several groups needs the blocks of all of them up to one token:
with full attention every block of the prefix, with a sliding window (or a
recurrent state) the last ones. So blocks are considered together, by the token
that each ends at. One group at a time would fill the room with blocks of the
first group, and serve no prefix.

A caller that reads each block as soon as it is READY, and then discards it, has blocks promoted
independently (``PromoteKeys``): it needs no room for all at once.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.core import messages as m
from kvtier.core.block_state import BlockState
from kvtier.core.messages import ReservePrefix, Survey
from kvtier.engine.decide.load_decision import ASKING, NOWHERE
from kvtier.engine.primary.eviction import ReserveAfterEviction
from kvtier.engine.primary.lookups import ABSENT, FILLING, READY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.core.messages import GroupKeys
    from kvtier.engine.primary.eviction import Eviction
    from kvtier.engine.primary.load_decisions import LoadDecisions
    from kvtier.engine.primary.lookups import Lookups
    from kvtier.engine.primary.promotions import Promotions
    from kvtier.engine.primary.requests import Request
    from kvtier.engine.primary.slot_table import SlotTable
    from kvtier.plugin_api.keys import Key, RequestId


REFUSED: Final = 0
"""Value of ``reserved`` if there was no room: reported once, then the request may try again."""


class PrefixReservations:
    """Handles ``Survey`` and ``ReservePrefix``."""

    def __init__(
        self,
        lookups: Lookups,
        slots: SlotTable,
        promotions: Promotions,
        eviction: Eviction,
        decisions: LoadDecisions,
    ) -> None:
        self.reply = lookups.reply
        self.policy = eviction.policy
        self._slots = slots
        self._slot_of: Mapping[Key, int] = slots.slot_of
        self._directory = lookups.directory
        self._promotions = promotions
        self._eviction = eviction
        self._counts = lookups.counts
        self._lookups = lookups
        self._decisions = decisions
        self._requests = lookups.requests

    def handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        """Return the handler of each message type that the primary tier delegates to this."""
        return {
            Survey: self.survey,
            ReservePrefix: self.reserve,
            ReserveAfterEviction: self.reserve_after_eviction,
            m.PromoteKeys: self.promote,
        }

    def survey(self, message: Survey) -> None:
        """Reply with the key's state; FILLING also if a tier has it and it may be reserved."""
        key = message.key
        request = self._requests.get(message.request)
        slot = self._slot_of.get(key)
        state = ABSENT
        if slot is not None:
            state = READY if self._slots.is_ready(slot) else FILLING
        elif request is not None:
            tier = self._directory.find(key, request.search)
            if tier == ASKING:
                state = BlockState.PROBING
            elif tier != NOWHERE and request.reserved is None:
                state = FILLING
        if state is READY and slot is not None:
            self._slots.note_hit(slot)
        if request is not None:
            if state is ABSENT:
                self._lookups.miss(key, request)
            self._note(key, state, request, is_at_tier=slot is None and state is not ABSENT)
        self.reply(state)

    def _note(self, key: Key, state: BlockState, request: Request, *, is_at_tier: bool) -> None:
        if state is READY and key not in request.misses:
            request.hits.add(key)
        elif key not in request.hits:
            request.misses.add(key)
        if is_at_tier:
            request.wait_for_tiers(self._promotions.waits_now)

    def reserve(self, message: ReservePrefix) -> None:
        """Promote and lease a prefix across groups; reply with its tokens, 0 for none."""
        request = self._requests.get(message.request)
        if request is None or request.reserved is not None:
            if request is not None and request.reserved == REFUSED:
                request.end_reservation()
            self.reply(0)
            return
        try:
            prefix = self._longest(message, request, self._promotions.room())
        except Unknown:
            self.reply(0)
            return
        if prefix is not None and message.first_token is not None and not request.is_weighed:
            kept = self._decisions.weigh_groups(
                message.groups, prefix.tokens, request, (message.first_token, message.now)
            )
            if kept < prefix.tokens:
                if kept:
                    self.reserve(message)  # blocks behind the cut now count as nowhere
                else:
                    self.reply(0)
                return
        if prefix is not None and (slots := self._slots_for(prefix)) > self._slots.free_count():
            then = ReserveAfterEviction(message)
            self._eviction.make_room(slots, then, frozenset(prefix.keys))
            return
        self._reserve(prefix, request)

    def reserve_after_eviction(self, message: ReserveAfterEviction) -> None:
        """Promote and lease the prefix that now fits: perhaps a shorter one than before."""
        call, room, free = message.reserve, self._promotions.room(), self._slots.free_count()
        request = self._requests[call.request]
        try:
            prefix = self._longest(call, request, room)
            if prefix is not None and self._slots_for(prefix) > free:
                prefix = self._longest(call, request, room, free)
        except Unknown:
            self.reply(0)
            return
        self._reserve(prefix, request)

    def _slots_for(self, prefix: Prefix) -> int:
        """Return how many free slots the prefix takes."""
        return sum(key not in self._slot_of for key in prefix.keys)

    def _reserve(self, prefix: Prefix | None, request: Request) -> None:
        if prefix is None:
            request.reserve(REFUSED)
            self._counts.promotions_refused += 1
            self.reply(0)
            return
        request.reserve(prefix.tokens)
        self._promote(prefix, request)
        self.reply(prefix.tokens)

    def _longest(
        self, message: ReservePrefix, request: Request, room: int, free: int | None = None
    ) -> Prefix | None:
        """Return the longest prefix for the room of promotions, and maybe for free slots."""
        slot_of, leased, find = self._slot_of, self._slots.leased, self._directory.find

        def cost(key: Key) -> int | None:
            slot = slot_of.get(key)
            if slot is not None:
                is_ours_to_lease = self._slots.is_ready(slot) and slot not in leased
                return int(is_ours_to_lease and free is None)
            tier = find(key, request.search)
            if tier == ASKING:
                raise Unknown
            return None if tier == NOWHERE else 1

        prefix = longest_prefix(message.groups, cost, room if free is None else min(room, free))
        if prefix is not None and free is not None:  # the blocks that it leases must fit too
            wanted = sum(
                key not in slot_of
                or (self._slots.is_ready(slot_of[key]) and slot_of[key] not in leased)
                for key in prefix.keys
            )
            return prefix if wanted <= room else None
        return prefix

    def _promote(self, prefix: Prefix, request: Request) -> None:
        name = request.search.request
        new: list[Key] = []
        kept: list[Key] = []
        for key in prefix.keys:
            slot = self._slot_of.get(key)
            if slot is None:
                tier = self._directory.find(key, request.search)
                slot = self._slots.allocate_for_tier(key, tier)
                self._promotions.start(key, slot, name, tier)
                new.append(key)
            elif self._slots.is_ready(slot) and slot not in self._slots.leased:
                self._promotions.lease(key, slot, name)
                kept.append(key)
        if kept:
            self.policy.post(m.Held(tuple(kept)))
        self._admit(new, name)

    def _admit(self, new: Sequence[Key], request: RequestId) -> None:
        self._directory.stop_probing(new)
        if new:
            self.policy.post(m.Admitted(tuple(new), request, held=True))

    def promote(self, message: m.PromoteKeys) -> None:
        """Promote blocks independently; reply with their states, None for lack of room."""
        request, name = self._requests.get(message.request), message.request
        room = min(self._promotions.room(), self._slots.free_count())
        states: list[BlockState | None] = []
        new: list[Key] = []
        for key in message.keys:
            slot = self._slot_of.get(key)
            tier = NOWHERE
            if slot is None and request is not None:
                tier = self._directory.find(key, request.search)
            if slot is not None:
                states.append(READY if self._slots.is_ready(slot) else FILLING)
            elif tier == NOWHERE:
                states.append(ABSENT)
            elif tier == ASKING:
                states.append(BlockState.PROBING)
            elif len(new) == room:
                states.append(None)  # go on: blocks behind it may be READY, and free their slots
            else:
                slot = self._slots.allocate_for_tier(key, tier)
                self._promotions.start(key, slot, name, tier)
                new.append(key)
                states.append(FILLING)
        self._admit(new, name)
        self.reply(states)


class Prefix(NamedTuple):
    """A prefix that fits, and its blocks in the order of the tokens that they end at."""

    tokens: int
    keys: tuple[Key, ...]


class Unknown(Exception):
    """Raised by ``cost`` for a block that tiers are being probed for."""


class _Prices:
    """The costs of one group's blocks, each computed once."""

    def __init__(self, group: GroupKeys, cost: Callable[[Key], int | None]) -> None:
        self.group = group
        self._cost = cost
        self._known: dict[Key, int | None] = {}
        self._sums = [0]  # of the first blocks, up to one that is unavailable
        self._is_whole = group.window is None

    def of(self, tokens: int) -> int | None:
        """Return the cost of the blocks needed for ``tokens``; None: one is unavailable."""
        needed = self.group.needed(tokens)
        if needed is None:
            return None
        if self._is_whole:
            self._sum_up()
            return self._sums[len(needed)] if len(needed) < len(self._sums) else None
        total = 0
        for key in needed:
            if key not in self._known:
                self._known[key] = self._cost(key)
            price = self._known[key]
            if price is None:
                return None
            total += price
        return total

    def _sum_up(self) -> None:
        if len(self._sums) > 1 or self._known:
            return
        for key in self.group.keys:
            price = self._known[key] = self._cost(key)
            if price is None:
                return
            self._sums.append(self._sums[-1] + price)


def longest_prefix(
    groups: Sequence[GroupKeys], cost: Callable[[Key], int | None], room: int
) -> Prefix | None:
    """Return the longest prefix whose blocks cost at most ``room``; None if not even one fits.

    ``cost`` of a block: None if it is unavailable.
    """
    prices = [_Prices(group, cost) for group in sorted(groups, key=_has_window)]
    ends = sorted({end for group in groups for end in group.ends}, reverse=True)
    for tokens in ends:
        total = 0
        for each in prices:
            price = each.of(tokens)
            if price is None or (total := total + price) > room:
                break
        else:
            parts = [group.needed(tokens) or () for group in groups]
            return Prefix(tokens, _by_position(groups, parts))
    return None


def _has_window(group: GroupKeys) -> bool:
    return group.window is not None


def _by_position(groups: Sequence[GroupKeys], parts: Sequence[tuple[Key, ...]]) -> tuple[Key, ...]:
    end_of = {key: end for group in groups for key, end in zip(group.keys, group.ends, strict=True)}
    return tuple(sorted((key for part in parts for key in part), key=end_of.__getitem__))


def storable(
    wanted: Sequence[Key], keys: Sequence[Key], cuts: Sequence[int] | None, room: int
) -> int:
    """Return how many of ``wanted``, from the first on, a store into ``room`` slots may take.

    ``wanted`` are some of ``keys``, in order. ``cuts``: how many of ``keys`` may
    be stored without those behind them, ascending; None: any number.
    """
    if room >= len(wanted) or cuts is None:
        return min(room, len(wanted))
    place = {key: number for number, key in enumerate(keys)}
    places = [place[key] for key in wanted]
    for cut in reversed(cuts):
        count = bisect_left(places, cut)
        if count <= room:
            return count
    return 0
