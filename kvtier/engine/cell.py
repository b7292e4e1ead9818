"""Defines the engine cell, which runs a set of actors.

The engine cell runs its actors inline, on whatever thread calls the facade,
message by message until none is left. A tier cell (``kvtier/tier/cell.py``)
runs on an event loop, in a thread or a process of its own. In a test cell
(``tests/support/cell.py``) a test picks the next delivery. Actors can't tell
the difference.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from kvtier.core import messages as m
from kvtier.core.actor import Mailbox
from kvtier.errors import Closed
from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier.core.actor import Actor
    from kvtier.core.wire import Message
    from kvtier.engine.link.flights import LinkTime

NO_REPLY: Final = object()
"""Returned by ``ask`` if the actor sent no reply, or broke before it could."""


class OwnedMailbox(Mailbox, Protocol):
    """A mailbox that is created before its actor."""

    def belong_to(self, actor: Actor) -> None:
        """Bind the mailbox to ``actor``. Call it once, before the first message is posted."""


class _InlineMailbox:
    """A mailbox of the engine cell: its messages are delivered before ``ask`` returns."""

    __slots__ = ("_actor", "_ready")

    def __init__(self, ready: deque[tuple[Actor, Message]]) -> None:
        self._ready = ready
        self._actor: Actor

    def belong_to(self, actor: Actor) -> None:
        """Bind the mailbox to ``actor``. Call it once, before the first message is posted."""
        self._actor = actor

    def post(self, message: Message) -> bool:
        """Queue the message. Never full: the cell is run until nothing is left."""
        self._ready.append((self._actor, message))
        return True


class _LogMailbox:
    """Writes notices to the log."""

    def post(self, message: Message) -> bool:
        """Write one notice."""
        if isinstance(message, m.Notice):
            detail = {"detail": message.detail} if message.detail else {}
            fields = {"tier": message.tier, **detail, **message.numbers}
            log.write(message.level, message.event, fields)
        return True


class EngineCell:
    """Runs actors inline, on one thread at a time; any thread may post to an ``inbox``.

    Create mailboxes first, then the actors that write to them; then bind each with ``add``.
    """

    def __init__(self) -> None:
        self._ready: deque[tuple[Actor, Message]] = deque()
        self._arrived: deque[tuple[Actor, Message]] = deque()
        self._replies: list[object] = []
        self.reply: Callable[[object], None] = self._replies.append
        self.log: Mailbox = _LogMailbox()
        self.faults = 0
        self.activity = 0  #: grows when anything is delivered
        self._clock: Callable[[], float]
        self._times: tuple[LinkTime, ...] = ()
        self._last_words: dict[Actor, tuple[Mailbox, Message]] = {}

    def mailbox(self) -> OwnedMailbox:
        """Return a mailbox for messages from actors of this cell."""
        return _InlineMailbox(self._ready)

    def inbox(self) -> OwnedMailbox:
        """Return a mailbox for messages from other threads; read when the cell next runs."""
        return _InlineMailbox(self._arrived)

    def add(
        self,
        actor: Actor,
        *mailboxes: OwnedMailbox,
        last_words: tuple[Mailbox, Message] | None = None,
    ) -> None:
        """Deliver the messages of these mailboxes to ``actor``.

        ``last_words``: a mailbox, and the message to post there if the actor breaks.
        """
        for mailbox in mailboxes:
            mailbox.belong_to(actor)
        if last_words is not None:
            self._last_words[actor] = last_words

    def tell_time(self, clock: Callable[[], float], times: Iterable[LinkTime]) -> None:
        """From now on, update the links' time whenever something arrives."""
        self._clock, self._times = clock, tuple(times)

    def _pass_time(self) -> None:
        if self._times:
            now = self._clock()
            for time in self._times:
                time.pass_to(now)

    def ask(self, actor: Actor, message: Message) -> object:
        """Deliver arrived messages, then ``message``, run to quiescence, return the reply."""
        if self._arrived:
            self.run()
        self.activity += 1
        # Nothing is queued now, so the message is next: no need to queue it.
        try:
            actor.handlers[type(message)](message)
        except Exception:  # noqa: BLE001 - a bug in an actor must not reach the engine
            self._fault(actor, message)
        if self._ready:
            self._deliver()
        replies = self._replies
        return replies.pop() if replies else NO_REPLY

    @property
    def has_arrivals(self) -> bool:
        """Whether other threads have sent messages that are not delivered yet."""
        return bool(self._arrived)

    def take_arrivals(self) -> list[tuple[Actor, Message]]:
        """Remove and return the messages that other threads have sent, with their actors."""
        arrivals = list(self._arrived)
        self._arrived.clear()
        return arrivals

    def run(self) -> None:
        """Deliver messages that other threads have sent so far, and all that follow from them."""
        if self._arrived:
            self._pass_time()
            self.activity += len(self._arrived)
            for _ in range(len(self._arrived)):
                self._ready.append(self._arrived.popleft())
        if self._ready:
            self._deliver()

    def _deliver(self) -> None:
        ready = self._ready
        while ready:
            actor, message = ready.popleft()
            try:
                # ``actor.receive``, inlined: this runs for each lookup.
                actor.handlers[type(message)](message)
            except Exception:  # noqa: BLE001 - as above
                self._fault(actor, message)

    def _fault(self, actor: Actor, message: Message) -> None:
        """Take down one actor's work, never the engine.

        Its state can't be trusted any more, so it gets no more messages. If the
        primary tier is gone, the facade reports every block as absent.
        """
        self.faults += 1
        actor.stop()
        log.error("actor broke", exc_info=True, actor=actor.name, message=type(message).__name__)
        if actor in self._last_words:
            mailbox, message = self._last_words[actor]
            mailbox.post(message)


class ClosedCell(EngineCell):
    """Replaces the engine cell once the runtime is closed: every use is refused."""

    def ask(self, actor: Actor, message: Message) -> object:  # noqa: ARG002 - as the open one
        """Refuse."""
        self.run()

    def run(self) -> NoReturn:
        """Refuse."""
        raise Closed("the runtime is closed. Open a new one with kvtier.open_runtime.")
