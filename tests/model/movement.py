"""What moves at tiers, seen from the messages: who is late, and what waits and in which order.

It is told of each message between a link and its tier, and between a link and the primary
tier, and keeps its own books: promises 18 (where stores are concerned), 19 and 20 are about these.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.engine.link.circuit_breaker import Work
from kvtier.plugin_api.backend import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from world import World

    from kvtier.core.actor import Actor
    from kvtier.core.wire import Message
    from kvtier.engine.link.audit import LinkAudit
    from kvtier.engine.primary.cascades import DeferredBlock
    from kvtier.plugin_api.keys import Key, RequestId
    from kvtier.settings.runtime_config import RuntimeConfig
    from tests.support.cell import TestMailbox

SLOWER_MAX = 2
"""A tier that is slow has at most so many times its limit."""


class Movements:
    """What moves at all tiers of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._of = [Movement(world.config, number) for number in range(len(world.links))]
        # Before the message that is delivered now:
        self._watched: frozenset[int] = frozenset()
        self._deferred: Mapping[Key, DeferredBlock] = {}  # what a tier wants again

    def note_post(self, mailbox: TestMailbox, message: Message) -> None:
        """Look at what a link sends its tier. What nobody waits for is not sent."""
        world = self._world
        if isinstance(message, m.Cascade):
            self.p18_nothing_is_sent_to_a_tier_behind_a_hole(mailbox, message)
        for tier, held in enumerate(world.runtime.tiers):
            if held.mailbox is mailbox:
                self._of[tier].sent(message, world.links[tier].audit())
                if not self._is_withdrawing():
                    self.p20_what_nobody_waits_for_is_not_sent(message)

    def p18_nothing_is_sent_to_a_tier_behind_a_hole(
        self, mailbox: TestMailbox, message: m.Cascade
    ) -> None:
        """Of what the primary tier sends: a tier's gate passes it on as it likes."""
        world = self._world
        holes = world.primary.audit().holes
        for tier, link in enumerate(world.links):
            taker = world.cell.mailbox_of(world.gates.get(tier, link))
            if taker is not mailbox or tier not in holes:
                continue
            request = world.requests.get(message.request)
            before = {key: block.before for key, block in self._deferred.items()}
            if not message.is_admitted and request is not None and request.is_told:
                before.update(zip(request.path, (None, *request.path), strict=False))
            for key in message.keys:
                assert before.get(key) not in holes[tier], f"{key!r} is sent behind a hole"

    def _is_withdrawing(self) -> bool:
        """Tell whether somebody has stopped waiting, and the link has not heard of it yet."""
        on_its_way = (m.Withdraw, m.RequestFinished, m.RequestsScheduled, m.Reset)
        waiting = self._world.cell.waiting()
        return any(isinstance(each, on_its_way) for box in waiting for each in box.waiting)

    def p20_what_nobody_waits_for_is_not_sent(self, message: Message) -> None:
        world = self._world
        if isinstance(message, wire.LoadJob):
            name = message.request
            is_over = name not in world.requests or name in world.decided
            assert not is_over, f"{message} is sent, and nobody waits for it"
        if isinstance(message, wire.Probe):
            seen = world.primary.audit()
            # What is being filled by now was to be asked for a request that still waits, for that.
            asked = [key for key in message.keys if key not in seen.slots.slot_of]
            # What one tier is found to have is not withdrawn from a question to a later one.
            directory = seen.directory
            idle = [
                key
                for key in asked
                if not directory.waiters.get(key) and key not in directory.settled
            ]
            assert not idle, f"{idle} are asked for, and nobody waits for the answer"

    def foresee(self, actor: Actor, message: Message) -> None:
        """Note what is about to be delivered to a link, or by one."""
        self._deferred = {}
        if isinstance(message, m.StoresWanted):
            self._deferred = self._world.primary.audit().deferred.get(message.tier, {})
            resident = self._world.primary.resident()
            assert self._deferred.keys() <= resident, "a block waits for a tier, and is gone"
        for tier, link in enumerate(self._world.links):
            if actor is link:
                seen = link.audit()
                self._watched = _all_watched(seen)
                self._of[tier].ended(message, seen)
                if isinstance(message, m.Promote):
                    self._of[tier].asked(message)

    def observe(self, actor: Actor, message: Message) -> None:
        """Check what a message has changed."""
        if actor is self._world.primary:
            self._observe_primary(message)
        for tier, link in enumerate(self._world.links):
            if actor is not link:
                continue
            if isinstance(message, wire.TierFenced):
                self._of[tier].fenced()
            if isinstance(message, wire.Tick):
                seen = link.audit()
                self._of[tier].p19_a_tier_that_moves_is_not_late(
                    self._watched - _all_watched(seen), seen
                )
                self._of[tier].p19_what_hangs_is_noticed(seen)

    def _observe_primary(self, message: Message) -> None:
        if isinstance(message, m.PromotionEnded | m.PromotionAbandoned | m.PromotionWithdrawn):
            self._of[message.tier].release(message.slots)
        if isinstance(message, m.CascadeDeferred) and message.epoch == self._world.epoch:
            seen = self._world.primary.audit()
            for key in message.keys if message.tier in seen.holes else ():
                is_there = seen.directory.known.get(key, 0) >> message.tier & 1
                assert is_there or key in seen.holes[message.tier], f"{key!r} is forgotten"
        if isinstance(message, m.PromotionLate):
            self.p20_what_arrives_late_and_sound_is_kept(message)

    def p20_what_arrives_late_and_sound_is_kept(self, message: m.PromotionLate) -> None:
        for key, outcome in zip(message.keys, message.outcomes, strict=True):
            is_of_use = outcome is Outcome.DONE and message.epoch == self._world.epoch
            is_of_use = is_of_use and not self._world.primary.audit().makes_room
            is_here = self._world.primary.slot_of(key) is not None
            assert not is_of_use or is_here, f"{key!r} has arrived, and is thrown away"


def _all_watched(seen: LinkAudit) -> frozenset[int]:
    return frozenset().union(*seen.watched.values())


class Movement:
    """Of one tier."""

    def __init__(self, config: RuntimeConfig, number: int) -> None:
        tier = config.tiers[number]
        self.limits = {
            Work.PROBE: tier.probe_timeout_s,
            Work.LOAD: tier.promote_timeout_s,
            Work.STORE: tier.store_timeout_s,
        }
        self._sent: dict[Work, dict[int, float]] = {work: {} for work in Work}
        self._overtaken: dict[int, float] = {}
        self._moved: dict[Work, float] = dict.fromkeys(Work, 0.0)
        self._unsent: dict[RequestId, list[int]] = defaultdict(list)  # slots, head to tail

        self._not_run_s = 0.0

    def _given(self, seen: LinkAudit) -> float:
        """Return what time it is, without the time for which the machine did not run the tier."""
        return seen.now - self._not_run_s

    # --- what the link sends, and what it is answered ---

    def sent(self, message: Message, seen: LinkAudit) -> None:
        """Note that a job or a probe was sent."""
        if isinstance(message, wire.LoadJob | wire.StoreJob):
            work = Work.LOAD if isinstance(message, wire.LoadJob) else Work.STORE
            number = message.job
        elif isinstance(message, wire.Probe):
            work, number = Work.PROBE, message.probe
        else:
            return
        if isinstance(message, wire.LoadJob):
            waiting = self._unsent[message.request]
            first = waiting[: len(message.slots)]
            assert tuple(first) == message.slots, f"{message} overtakes {waiting}"
            del waiting[: len(first)]
        if not seen.watched[work] - {number}:
            self._moved[work] = self._given(seen)
        self._sent[work][number] = seen.now

    def ended(self, message: Message, seen: LinkAudit) -> None:
        """Note what arrives at the link, which has not taken it in yet."""
        if isinstance(message, wire.JobEnded):
            number = message.job
        elif isinstance(message, wire.ProbeAnswer):
            number = message.probe
        else:
            self._not_run_s += message.seconds if isinstance(message, wire.TierNotRun) else 0.0
            return
        for work, sent in self._sent.items():
            if number not in sent or (work is Work.PROBE) is isinstance(message, wire.JobEnded):
                continue
            del sent[number]
            was_overtaken = self._overtaken.pop(number, None) is not None
            self._moved[work] = self._given(seen)
            if was_overtaken or number not in seen.watched[work]:
                continue
            for other in sent:
                if other < number:
                    self._overtaken.setdefault(other, self._given(seen))

    def fenced(self) -> None:
        """Note that nothing is left of the tier."""
        for sent in self._sent.values():
            sent.clear()
        self._overtaken.clear()

    # --- promises ---

    def p19_what_hangs_is_noticed(self, seen: LinkAudit) -> None:
        """Nothing is waited for at a tier that does nothing any more."""
        for work, watched in seen.watched.items():
            idle_s = self._given(seen) - self._moved[work]
            assert not watched or idle_s < SLOWER_MAX * self.limits[work], (work, watched, idle_s)

    def p19_a_tier_that_moves_is_not_late(self, numbers: Iterable[int], seen: LinkAudit) -> None:
        """Whatever is called late was overtaken, or nothing of its kind has moved."""
        for number in numbers:
            job = seen.jobs.get(number)
            work = Work.PROBE if job is None else Work.LOAD if job.is_load else Work.STORE
            given = self._given(seen)
            since = min(self._moved[work], self._overtaken.get(number, given))
            assert given - since >= self.limits[work], f"{work!r} {number} is late, and moves"

    # --- what waits ---

    def asked(self, message: m.Promote) -> None:
        """Note what the primary tier asks of the link."""
        self._unsent[message.request].extend(message.slots)

    def release(self, slots: tuple[int, ...]) -> None:
        """Note that slots of promotions are the primary tier's again."""
        gone = set(slots)
        for waiting in self._unsent.values():
            waiting[:] = [slot for slot in waiting if slot not in gone]
