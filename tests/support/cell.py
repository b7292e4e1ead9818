"""The test cell: every mailbox is a queue of its own, and a test picks the next delivery.

Actors can't tell which cell runs them, so what holds here under every order of
deliveries holds in the engine cell too. Within one mailbox the order is the
order of posting; between mailboxes it is the test's to choose:

- A facade call runs the *engine's* mailboxes until none has a message, as the
  engine cell does, but ``pick`` says which one goes next. It may also pick a
  mailbox from elsewhere, so an answer of a tier can arrive in the middle.
- Between calls nothing moves unless the test calls ``deliver`` or ``settle``.
- No tier has threads here. ``TestTier`` holds the real actors of a tier cell;
  the test plays the driver of the backend: it sees the batches, copies bytes or
  doesn't, and answers, or never does.

To check an eviction policy of your own::

    runtime = open_test_runtime(config, MyPolicy(config.slot_count), clock=lambda: now)
    runtime.cell.pick = lambda waiting: random.randrange(len(waiting))
    runtime.facade.prepare_store(keys, "r1")

A handler that raises ends the test, unless ``raises_faults`` is False: then its
actor is cut off, as in the engine cell.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, cast

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.actor import Actor
from kvtier.core.generations import Generations
from kvtier.core.policy_actor import PolicyActor
from kvtier.engine.cell import NO_REPLY, EngineCell
from kvtier.engine.facade import SchedulerFacade
from kvtier.errors import InternalError
from kvtier.runtime import Engine, build_engine, make_admissions
from kvtier.settings.plugins import fallback_policy
from kvtier.tier import driver_messages as d
from kvtier.tier.bounded_tier import BoundedTier
from kvtier.tier.unbounded_tier import UnboundedTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.core.tier_host import TierHost
    from kvtier.core.wire import Message
    from kvtier.engine.link.tier_link import TierLink
    from kvtier.engine.primary.primary_tier import PrimaryTier
    from kvtier.plugin_api.backend import BackendTraits, Outcome
    from kvtier.plugin_api.eviction_policy import EvictionPolicy
    from kvtier.settings.runtime_config import RuntimeConfig

Batch: TypeAlias = d.ProbeBatch | d.LoadBatch | d.StoreBatch | d.RemoveBatch
"""What a tier asks of its backend in one call."""

DELIVERIES_MAX: Final = 100_000
"""A single facade call that needs more than this goes round in circles."""


class TestMailbox:
    """One mailbox of the test cell. ``waiting`` may be read, garbled or doubled by the test."""

    __test__: ClassVar = False
    __slots__ = ("_cell", "actor", "ages", "is_engine", "name", "waiting")

    def __init__(self, cell: TestCell, name: str = "", *, is_engine: bool) -> None:
        self._cell = cell
        self.actor: Actor
        self.name = name
        self.is_engine = is_engine  #: a facade call runs it until it is empty
        self.waiting: deque[Message] = deque()
        self.ages: deque[int] = deque()

    def belong_to(self, actor: Actor) -> None:
        """Have the messages delivered to ``actor``."""
        self.actor = actor
        self.name = self.name or (actor.name if self.is_engine else f"inbox of {actor.name}")

    def post(self, message: Message) -> bool:
        """Take the message. Never full."""
        self.waiting.append(message)
        self.ages.append(self._cell.next_age())
        self._cell.on_post(self, message)
        return True

    def clear(self) -> None:
        """Lose what waits: its cell is gone."""
        self.waiting.clear()
        self.ages.clear()

    def __repr__(self) -> str:
        """Return the name and what waits."""
        return f"<{self.name}: {', '.join(type(each).__name__ for each in self.waiting)}>"


def oldest_first(_waiting: Sequence[TestMailbox]) -> int:
    """Deliver as the engine cell does. The default of ``TestCell.pick``."""
    return 0


class TestCell(EngineCell):
    """A drop-in for ``EngineCell`` that delivers in the order a test picks.

    ``pick`` gets the mailboxes that have messages, the engine's first, then
    those from elsewhere, each oldest first; it returns an index.
    ``before_delivery`` and ``after_delivery`` see every delivery, ``on_post``
    every message that a mailbox took.
    """

    __test__: ClassVar = False

    def __init__(self) -> None:
        super().__init__()
        self.pick: Callable[[Sequence[TestMailbox]], int] = oldest_first
        self.on_post: Callable[[TestMailbox, Message], None] = lambda _mailbox, _message: None
        self.before_delivery: Callable[[Actor, Message], None] = lambda _actor, _message: None
        self.after_delivery: Callable[[Actor, Message], None] = lambda _actor, _message: None
        self.raises_faults = True
        self.notices: list[m.Notice] = []
        self.log = _NoticeList(self.notices)
        self._engine: list[TestMailbox] = []
        self._elsewhere: list[TestMailbox] = []
        self._age = 0

    def mailbox(self) -> TestMailbox:
        """Return a mailbox for messages from actors of the engine."""
        mailbox = TestMailbox(self, is_engine=True)
        self._engine.append(mailbox)
        return mailbox

    def inbox(self) -> TestMailbox:
        """Return a mailbox for messages from tiers, which wait to be let in."""
        mailbox = TestMailbox(self, is_engine=False)
        self._elsewhere.append(mailbox)
        return mailbox

    def mailbox_elsewhere(self, name: str) -> TestMailbox:
        """Return a mailbox that no facade call waits for: of an actor of another cell."""
        mailbox = TestMailbox(self, name, is_engine=False)
        self._elsewhere.append(mailbox)
        return mailbox

    def mailbox_of(self, actor: Actor) -> TestMailbox:
        """Return the mailbox of an actor of the engine."""
        return next(each for each in self._engine if each.actor is actor)

    def inbox_of(self, actor: Actor) -> TestMailbox:
        """Return the inbox of a link."""
        return next(each for each in self._elsewhere if each.actor is actor)

    def remove(self, mailbox: TestMailbox) -> None:
        """Lose a mailbox from elsewhere with all that waits in it: its cell is gone."""
        mailbox.clear()
        self._elsewhere.remove(mailbox)

    def waiting(self) -> list[TestMailbox]:
        """Return what could be delivered: the engine's mailboxes first, each oldest first."""
        engine = [each for each in self._engine if each.waiting]
        engine.sort(key=_age_of)
        return engine + self.waiting_elsewhere()

    def waiting_elsewhere(self) -> list[TestMailbox]:
        """Return the inboxes and the tiers' mailboxes that have messages, oldest first."""
        found = [each for each in self._elsewhere if each.waiting]
        found.sort(key=_age_of)
        return found

    def deliver(self, mailbox: TestMailbox) -> None:
        """Deliver the first message that waits in ``mailbox``, and nothing that follows."""
        self.activity += not mailbox.is_engine
        mailbox.ages.popleft()
        message = mailbox.waiting.popleft()
        actor = mailbox.actor
        if not mailbox.is_engine:
            self._pass_time()
        self.before_delivery(actor, message)
        try:
            actor.receive(message)
        except Exception:
            if self.raises_faults:
                raise
            self._fault(actor, message)
        self.after_delivery(actor, message)

    def ask(self, actor: Actor, message: Message) -> object:
        """Post ``message``, run the engine to quiescence in the picked order, return the reply."""
        self.run()
        self.activity += 1
        self.mailbox_of(actor).post(message)
        self.run()
        return self._replies.pop() if self._replies else NO_REPLY

    def run(self) -> None:
        """Deliver in the picked order until the engine's mailboxes are empty."""
        for _ in range(DELIVERIES_MAX):
            if not any(each.waiting for each in self._engine):
                return
            waiting = self.waiting()
            self.deliver(waiting[self.pick(waiting)])
        raise InternalError(f"the engine is not quiet after {DELIVERIES_MAX} deliveries")

    def settle(self) -> None:
        """Deliver everything everywhere, oldest first, and all that follows from it."""
        for _ in range(DELIVERIES_MAX):
            waiting = self.waiting()
            if not waiting:
                return
            self.deliver(waiting[0])
        raise InternalError(f"the cell is not quiet after {DELIVERIES_MAX} deliveries")

    def break_down(self, actor: Actor) -> None:
        """Take down an actor as if a handler of its had raised."""
        poison = m.Notice(event="taken down by the test", tier="", detail="")
        try:
            actor.receive(poison)
        except InternalError:
            self._fault(actor, poison)

    def next_age(self) -> int:
        """Return a number that grows with each message."""
        self._age += 1
        return self._age


class TestTier:
    """The tier side of one link: the real actors, and a driver that the test plays.

    ``batches`` are what the backend was asked and has not answered, oldest
    first. Answer with ``answer``; not answering is a backend that hangs. It has
    nothing from before, unless ``on_announce_contents`` says so.
    """

    __test__: ClassVar = False

    def __init__(
        self,
        cell: TestCell,
        link: TierLink,
        traits: BackendTraits,
        policy: EvictionPolicy | None = None,
    ) -> None:
        if (policy is None) is not (traits.capacity_blocks is None):
            raise InternalError("a tier has a policy if, and only if, it has a capacity")
        self.name = link.name.removeprefix("link:")
        self.is_full = False  #: the tier's mailbox takes nothing from the link
        self.batches: list[Batch] = []
        self.policy = policy
        self._cell = cell
        self.inbox = cell.inbox_of(link)
        self.mailbox = cell.mailbox_elsewhere(f"tier:{self.name}")
        self.driver = cell.mailbox_elsewhere(f"driver of {self.name}")
        self.driver.belong_to(_Driver(self.name, self.batches, self._announce_contents))
        self.on_announce_contents = self._nothing_to_announce  #: what the driver does about it
        self.mailboxes = [self.mailbox, self.driver]
        self.actor: BoundedTier | UnboundedTier
        if policy is None:
            self.actor = UnboundedTier(self.name, traits, link=self.inbox, driver=self.driver)
        else:
            to_policy = cell.mailbox_elsewhere(f"policy of tier:{self.name}")
            self.mailboxes.append(to_policy)
            to_policy.belong_to(
                PolicyActor(to_policy.name, policy, fallback_policy(), self.mailbox)
            )
            self.actor = BoundedTier(
                self.name, traits, link=self.inbox, driver=self.driver, policy=to_policy
            )
        self.mailbox.belong_to(self.actor)
        assert isinstance(link.tier, FromLink)
        link.tier.lead_to(self)
        link.set_traits(traits)

    @property
    def bounded(self) -> BoundedTier:
        """The actor of a tier with a capacity."""
        assert isinstance(self.actor, BoundedTier)
        return self.actor

    def answer(
        self, batch: Batch, outcomes: Sequence[Outcome], seconds: float = 0.0, at: float = 0.0
    ) -> None:
        """End a batch, with one outcome a block; or with any others, to see what happens."""
        if batch in self.batches:
            self.batches.remove(batch)
        ended = d.BatchEnded(batch=batch.batch, outcomes=tuple(outcomes), seconds=seconds, at=at)
        self.mailbox.post(ended)

    def _announce_contents(self, message: d.AnnounceContents) -> None:
        self.on_announce_contents(message)

    def _nothing_to_announce(self, _message: d.AnnounceContents) -> None:
        self.mailbox.post(d.ContentsAnnounced())

    def end(self) -> None:
        """Lose the cell: nothing that waits in it is delivered any more."""
        self.is_full = True
        for mailbox in self.mailboxes:
            self._cell.remove(mailbox)
        self.mailboxes.clear()
        self.batches.clear()

    # What the facade asks of a tier cell.

    def wake(self) -> None:
        """There is no thread to wake."""
        return

    def poll(self) -> None:
        """Do nothing: what is sent lies in the cell already."""
        return

    def ask_to_end(self) -> None:
        """There is no thread to end."""
        return

    def wait_until_ended(self, _timeout_s: float) -> bool:
        """There is no thread to wait for."""
        return True


class TestRuntime:
    """A facade, the actors behind it, and the cell that holds them all."""

    __test__: ClassVar = False

    def __init__(
        self, facade: SchedulerFacade, engine: Engine, cell: TestCell, tiers: list[TestTier]
    ) -> None:
        self.facade = facade
        self.engine = engine
        self.cell = cell
        self.tiers = tiers

    @property
    def primary(self) -> PrimaryTier:
        """The primary tier's actor."""
        return self.engine.primary


def build_test_engine(cell: TestCell, config: RuntimeConfig, policy: EvictionPolicy) -> Engine:
    """Wire up an engine in a test cell; its links lead nowhere until they have a ``TestTier``."""
    ends = [(cell.inbox(), FromLink()) for _ in config.tiers]
    return build_engine(cell, config, policy, make_admissions(config), ends, collect_events=True)


def open_test_runtime(
    config: RuntimeConfig,
    policy: EvictionPolicy,
    tiers: Sequence[tuple[BackendTraits, EvictionPolicy | None]] = (),
    *,
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> TestRuntime:
    """Put a runtime together in a test cell. ``tiers``: one entry for each of ``config.tiers``.

    A tier's policy is None exactly where its traits have no capacity. Events
    are collected. ``random_bytes``: what tells generations apart; never the same twice.
    """
    cell = TestCell()
    engine = build_test_engine(cell, config, policy)
    held = [
        TestTier(cell, link, traits, tier_policy)
        for link, (traits, tier_policy) in zip(engine.links, tiers, strict=True)
    ]
    facade = SchedulerFacade(
        cell,
        engine.primary,
        engine.links,
        # A tier of a test cell has the few members of a tier's host that a facade uses.
        cast("list[TierHost]", held),
        close_timeout_s=config.close_timeout_s,
        generations=Generations(
            config.weights_version, keep=config.keeps_on_reset, random_bytes=random_bytes
        ),
        clock=clock,
    )
    return TestRuntime(facade, engine, cell, held)


def _age_of(mailbox: TestMailbox) -> int:
    return mailbox.ages[0]


class _NoticeList:
    """Keeps the notices that the engine cell would write to the log."""

    def __init__(self, notices: list[m.Notice]) -> None:
        self._notices = notices

    def post(self, message: Message) -> bool:
        """Take one notice."""
        if isinstance(message, m.Notice):
            self._notices.append(message)
        return True


class _Driver(Actor):
    """Where batches arrive; the test does the rest."""

    def __init__(
        self,
        name: str,
        batches: list[Batch],
        announce: Callable[[Any], None],
    ) -> None:
        take: Callable[[Any], None] = batches.append

        def ignore(_: Any) -> None:
            """Of requests no backend here has to be told."""

        super().__init__(
            f"driver of {name}",
            {
                d.ProbeBatch: take,
                d.LoadBatch: take,
                d.StoreBatch: take,
                d.RemoveBatch: take,
                d.AnnounceContents: announce,
                **dict.fromkeys((wire.RequestOpened, wire.RequestClosed, wire.PrefixHits), ignore),
            },
        )


class FromLink:
    """A tier's mailbox as its link sees it: of one cell after the other; it can be full."""

    def __init__(self) -> None:
        self._tier: TestTier | None = None

    def lead_to(self, tier: TestTier) -> None:
        """Post to this tier from now on."""
        self._tier = tier

    def post(self, message: Message) -> bool:
        """Take the message, unless there is no tier, or the test says that its mailbox is full."""
        tier = self._tier
        return tier is not None and not tier.is_full and tier.mailbox.post(message)
