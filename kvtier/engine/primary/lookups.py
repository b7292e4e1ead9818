"""Handles the primary tier's lookups, and begins the promotions that they need.

Part of the primary tier's actor: three of its handlers, with the state they read.
They run for each key of each waiting request in each step, so code is inlined
where a call would read better.

A step's probes and promotions are sent to the secondary tiers together when the step ends.
So a tier gets one message for all blocks that a request needs from it. For a request-scoped tier
that may be the only chance: vLLM's ``p2p`` delivers only the blocks that are requested first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.core import messages as m
from kvtier.core.block_state import BlockState
from kvtier.engine.account.sources import PRIMARY
from kvtier.engine.decide.load_decision import ASKING, NOWHERE
from kvtier.engine.primary.eviction import LookupAfterEviction
from kvtier.engine.primary.slot_table import SlotState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.core.actor import Mailbox
    from kvtier.core.statistics import AbsenceReason, PrimaryCounts
    from kvtier.engine.primary.eviction import Eviction
    from kvtier.engine.primary.load_decisions import LoadDecisions
    from kvtier.engine.primary.promotions import Promotions
    from kvtier.engine.primary.requests import Request
    from kvtier.engine.primary.slot_table import SlotTable
    from kvtier.engine.primary.tier_directory import TierDirectory
    from kvtier.plugin_api.keys import Key, RequestId


# Read in each lookup: a global takes half the time of an enum's member.
ABSENT: Final = BlockState.ABSENT
FILLING: Final = BlockState.FILLING
READY: Final = BlockState.READY
_SLOT_READY: Final = int(SlotState.READY)


NO_ROOM: Final[tuple[int, AbsenceReason]] = (PRIMARY, "no_room")


class LookedUp(NamedTuple):
    """The keys that a running request has looked up."""

    hits: frozenset[Key]
    misses: frozenset[Key]
    slots_wanted: int  #: slots that it waits for before it loads


class Lookups:
    """Handles ``Lookup`` and ``LookupPrefix``. ``room``: slots to free when none is."""

    def __init__(
        self,
        slots: SlotTable,
        directory: TierDirectory,
        promotions: Promotions,
        eviction: Eviction,
        decisions: LoadDecisions,
        *,
        room: int,
        reply: Callable[[object], None],
    ) -> None:
        self.reply = reply
        self.policy = eviction.policy
        self.requests: dict[RequestId, Request] = {}
        self._slots = slots
        self._slot_state = slots.state
        self._note_hit = slots.note_hit
        self._slot_of: Mapping[Key, int] = slots.slot_of
        self.directory = directory
        self._find = directory.find
        self._promotions = promotions
        self._eviction = eviction
        self.counts: PrimaryCounts = decisions.counts
        self._room = room
        self._decisions = decisions
        self.account = decisions.account

    def handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        """Return the handler of each message type that the primary tier delegates to this."""
        return {
            **self._decisions.handlers(),
            m.Lookup: self.lookup,
            LookupAfterEviction: self.lookup_after_eviction,
            m.LookupPrefix: self.lookup_prefix,
            m.LoadSources: self._load_sources,
            m.AskReport: self._report,
        }

    def audit(self) -> dict[RequestId, LookedUp]:
        """Return the hits and misses of each request. For tests and diagnosis: it costs O(n)."""
        return {
            name: LookedUp(frozenset(each.hits), frozenset(each.misses), each.room_wanted)
            for name, each in self.requests.items()
        }

    def on_load(self, message: m.PrepareLoad) -> None:
        """Account for blocks that the GPU is about to read."""
        request = self.requests.get(message.request)
        if request is None:
            return
        request.count(self.counts)
        self.end_wait(request)
        if message.tokens is not None:
            first, end = message.tokens
            loaded = self.account.on_load(message.keys, request.sources, end - first)
            request.load(loaded)
            self.counts.prefill_saved_seconds += self._decisions.prefill_s(first, end)

    def end_wait(self, request: Request) -> None:
        """Note that a request no longer waits for tiers."""
        seconds = request.end_wait(self._promotions.waits_now)
        if seconds is not None:
            self.account.on_wait_ended(seconds)

    def miss(
        self, key: Key, request: Request, why: tuple[int, AbsenceReason] | None = None
    ) -> None:
        """Account for the first block that a request does not get, once a wait.

        ``why``: the source and the reason, if known.
        """
        if request.mark_missed():
            why = why or self.directory.absence_of(key, request.search)
            request.miss(*self.account.on_miss(key, why, self._promotions.waits_now))

    def count_of(self, request_id: RequestId) -> None:
        """Add a request's lookups to the counts, if it runs."""
        request = self.requests.get(request_id)
        if request is not None:
            request.count(self.counts)

    def lookup(self, message: m.Lookup) -> None:
        """Reply with the key's state, once there is room for it if it needs some."""
        key = message.key
        request = self.requests.get(message.request)
        slot = self._slot_of.get(key)
        if slot is not None and self._slot_state[slot] == _SLOT_READY:
            self._note_hit(slot)
            if request is not None and key not in request.misses:
                request.hits.add(key)
            self.reply(READY)
            return
        if request is None:
            self.reply(ABSENT if slot is None else FILLING)
            return
        if key not in request.hits:
            request.misses.add(key)
        if slot is not None:
            self.reply(FILLING)
            return
        search = request.search
        tier = self._find(key, search) if search.tiers else NOWHERE
        if tier == NOWHERE:
            if not request.was_missed:  # tested here, as this runs for each key
                self.miss(key, request)
            self.reply(ABSENT)
            return
        state = self._go_on(tier, key, request)
        if state is None:
            self._eviction.make_room(self._room, LookupAfterEviction(message))
            return
        self.reply(state)

    def lookup_after_eviction(self, message: LookupAfterEviction) -> None:
        """Reply to a lookup for which no slot was free."""
        key, request = message.lookup.key, self.requests[message.lookup.request]
        state = self._go_on(self._find(key, request.search), key, request)
        if state is None:
            waits = request.room_wanted > 0
            self.counts.promotions_refused += not waits
            if not waits:
                self.miss(key, request, NO_ROOM)
            state = BlockState.PROBING if waits else ABSENT
        self.reply(state)

    def lookup_prefix(self, message: m.LookupPrefix) -> None:
        """Reply with the keys' states, up to the first that would need an eviction."""
        states: list[BlockState] = []
        request = self.requests.get(message.request)
        if request is None:
            self.reply(states)
            return
        request.search.ask_in_order()
        hits: list[Key] = []
        hit_slots: list[int] = []
        slot_of, slot_state = self._slot_of, self._slot_state
        is_to_decide = message.place is not None and not request.is_weighed
        for key in message.keys:
            slot = slot_of.get(key)
            if slot is not None and slot_state[slot] == _SLOT_READY:
                hits.append(key)
                hit_slots.append(slot)
                states.append(READY)
                continue
            state = FILLING
            if slot is None:
                if is_to_decide:
                    is_to_decide = False
                    self._weigh(message, request, len(states))
                found = self._go_on(self._find(key, request.search), key, request)
                if found is None:
                    break
                state = found
            if key not in request.hits:
                request.misses.add(key)
            states.append(state)
            if state is ABSENT:
                self.miss(key, request)
                break
        if request.misses.isdisjoint(hits):
            request.hits.update(hits)
        else:  # some were not READY at their first lookup
            request.hits.update(set(hits) - request.misses)
        self._slots.note_hits(hit_slots)
        self.reply(states)

    def _weigh(self, message: m.LookupPrefix, request: Request, first: int) -> None:
        """Decide what the request loads of the keys from ``first`` on, if possible yet."""
        place = message.place
        assert place is not None, "a decision needs the keys' place"
        start = place.first_token + first * place.chunk_tokens
        place = place._replace(first_token=start)
        self._decisions.weigh(message.keys[first:], request, place, message.now)

    def _load_sources(self, message: m.LoadSources) -> None:
        request = self.requests.get(message.request)
        self.reply({} if request is None else dict(request.sources))

    def _report(self, message: m.AskReport) -> None:
        request = self.requests.get(message.request)
        self.reply(None if request is None else request.report())

    def _go_on(self, tier: int, key: Key, request: Request) -> BlockState | None:
        """Return the state of a key that has no slot, given the result of ``find``.

        Begin to promote it if a tier has it. None: a slot must be freed first.
        """
        if tier == NOWHERE:
            return ABSENT
        request.wait_for_tiers(self._promotions.waits_now)
        if tier == ASKING:
            return BlockState.PROBING
        if request.room_wanted and self._promotions.lets_wait(request):
            self.counts.requests_waited += request.begin_to_wait()
            return BlockState.PROBING
        if not self._promotions.has_room():
            self.counts.promotions_refused += 1
            self.miss(key, request, NO_ROOM)
            return ABSENT
        if not self._slots.free_count():
            return None
        if request.room_wanted:
            request.stop_waiting()
        self.directory.stop_probing((key,))
        slot = self._slots.allocate_for_tier(key, tier)
        self._promotions.start(key, slot, request.search.request, tier)
        self.policy.post(m.Admitted((key,), request.search.request, held=True))
        return FILLING


class StepRequests:
    """Sends the links the probes and promotions of lookups. Part of the primary tier's actor."""

    def __init__(
        self,
        directory: TierDirectory,
        promotions: Promotions,
        requests: Mapping[RequestId, Request],
        links: Sequence[Mailbox],
        wait_timeout_s: float,
    ) -> None:
        """``wait_timeout_s``: no request waits for longer."""
        self._directory = directory
        self._promotions = promotions
        self._requests = requests
        self._links = links
        self._wait_timeout_s = wait_timeout_s
        self._ticks = 0  # since a step ended

    def end_step(self, epoch: int) -> None:
        """Send the step's probes and promotions, and end state that lasts for a step."""
        self._ticks = 0
        self._send(epoch)

    def tick(self, epoch: int) -> None:
        """Send them also if the step takes long: it may never end."""
        self._ticks += 1
        if self._ticks > 1:
            self._send(epoch)

    def _send(self, epoch: int) -> None:
        if not self._links:
            return
        self._directory.end_step()
        for tier, name, probed in self._directory.pop_unsent():
            in_order = self._directory.asks_in_order(name)
            asked = m.ProbeKeys(tuple(probed), asker=name, in_order=in_order)
            self._links[tier].post(asked)
        for name, tier, probed in self._directory.pop_unsent_apart():
            self._links[tier].post(m.ProbeKeys(tuple(probed), name, asker=name))
        for (tier, name), (keys, slots) in self._promotions.pop_unsent().items():
            request, longest_s = self._requests.get(name), self._wait_timeout_s
            patience_s = longest_s if request is None else min(request.patience_s, longest_s)
            most_s = longest_s if request is None else min(request.patience_max_s, longest_s)
            promote = m.Promote(tuple(keys), tuple(slots), epoch, name, patience_s, most_s)
            self._links[tier].post(promote)
