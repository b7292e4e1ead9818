"""The cell of one secondary tier: its actors, and the event loop that runs them.

A cell lives once, on the loop of its host: a thread (``kvtier/tier_thread.py``)
or a process of its own (``kvtier/tier_process.py``). It delivers messages to
the tier's actors, and lets their driver run the backend's coroutines. When an
actor raises, or the backend can't be opened, the life ends with that error;
what follows is the host's business.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

import anyio

from kvtier.backend_counts import Counting
from kvtier.backend_driver import BackendDriver
from kvtier.logs import printable
from kvtier.policies.actor import PolicyActor
from kvtier.secondary_tier import SecondaryTier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.actor import Actor, Mailbox
    from kvtier.backend import Backend, BackendTraits
    from kvtier.memory import SlotMemory
    from kvtier.messages import Message
    from kvtier.policies.base import EvictionPolicy

ABANDON_S: Final = 0.5
"""Of the time that ``close`` is given: what is left when what still runs is given up."""

CLOSE_BACKEND_S: Final = 2.0


class _LifeEnds(Exception):
    """No error: the cell is to end, and what it still runs is cancelled."""


class TierHost(Protocol):
    """What runs a tier's cell, as the engine's side sees it. It is the cell's mailbox too.

    All methods belong to the thread that calls the facade, but ``post``, which
    a host may allow to others.
    """

    name: str
    unusable_for: str | None
    """Why the tier can't be used at the start, and begins cut off; None: it can."""

    @property
    def traits(self) -> BackendTraits | None:
        """The backend's; None while there is none yet."""

    @property
    def place(self) -> str | None:
        """The backend's."""

    def start(self) -> None:
        """Have the backend opened and messages delivered. Nothing here waits for that.

        Without a backend: tell the link so, and try to make one until that works.
        """

    def post(self, message: Message) -> bool:
        """Take a message for the tier's actor; it is delivered after the next ``wake``.

        False: too many wait, or the cell is ending or cut off.
        """

    def wake(self) -> None:
        """Have what was posted delivered. Never waits; done once a step."""

    def take(self) -> None:
        """Hand the link what the tier has sent, if that doesn't come by itself. Never waits."""

    def ask_to_end(self) -> None:
        """Take nothing more, end what was begun, then end. Returns at once."""

    def close(self, timeout_s: float) -> bool:
        """Ask the cell to end and wait up to ``timeout_s``. False: something still runs.

        False means that a thread of the tier may still touch the slots: the
        memory must stay mapped. What was begun may take all of the time but
        the last ``ABANDON_S``; then it is given up.
        """


class Doorbell(Protocol):
    """Wakes the loop from outside."""

    @property
    def descriptor(self) -> int:
        """A file that is readable when somebody has rung."""

    def answer(self) -> None:
        """Note that the loop is awake; bring in what came, if that is its way. Loop thread only."""


class TierCell:
    """One life of a tier's actors and its backend."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        memory: SlotMemory,
        link: Mailbox,
        make_policy: Callable[[], EvictionPolicy] | None = None,
    ) -> None:
        self.arrived: deque[tuple[Actor | BackendDriver, Message]] = deque()
        self.is_woken = False  #: rung, and not yet awake
        self._backend = backend
        self._is_delivering = False
        self._waking: anyio.Event  # set when there is something to deliver
        self.driver = BackendDriver(
            name, backend, memory, lambda message: self._later(self._tier, message)
        )
        self._counting = Counting(name, self.driver.counters, link)
        self._tier = SecondaryTier(name, backend.traits)
        self._tier.link = link
        self._tier.driver = _CellMailbox(self, self.driver)
        if make_policy is not None:
            policy = PolicyActor(f"policy:{name}", make_policy())
            policy.host = _CellMailbox(self, self._tier)
            self._tier.policy = _CellMailbox(self, policy)

    def post(self, message: Message) -> None:
        """Take a message for the tier's actor. Any thread; ring the doorbell afterwards."""
        self.arrived.append((self._tier, message))

    async def live(
        self,
        doorbell: Doorbell,
        *,
        opened: Callable[[Mapping[str, int]], None],
        is_ending: Callable[[], bool],
        is_abandoned: Callable[[], bool],
    ) -> None:
        """Open the backend and deliver messages until the cell is to end.

        ``opened`` is called once the backend is, with the levels among its counters.
        ``is_ending``: end when
        nothing is at the backend; ``is_abandoned``: end now.
        """
        loop = asyncio.get_running_loop()

        def rung() -> None:
            doorbell.answer()
            self._waking.set()

        self._waking = anyio.Event()
        loop.add_reader(doorbell.descriptor, rung)
        self._backend.on_lost = self.driver.tell_lost
        await self._backend.open()
        opened(await self._counting.levels(self._backend.traits.levels))
        try:
            await self._serve(lambda: is_abandoned() or (is_ending() and self._tier.is_idle()))
        except* _LifeEnds:
            pass
        finally:
            loop.remove_reader(doorbell.descriptor)
            self.driver.stop()
            with anyio.CancelScope(shield=True):
                await self._counting.end()
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_BACKEND_S):
                await self._backend.close()

    async def _serve(self, is_over: Callable[[], bool]) -> None:
        """Deliver messages and run parts. Ends with ``_LifeEnds``, or with what broke."""
        # asyncio's own: a task of anyio's takes four times as long to start, once a part.
        async with asyncio.TaskGroup() as tasks:
            self.driver.tasks = tasks
            tasks.create_task(self._counting.go_on())
            while True:
                self._waking = anyio.Event()
                self.is_woken = False
                self._deliver()
                if is_over():
                    raise _LifeEnds
                await self._waking.wait()

    def _later(self, actor: Actor | BackendDriver, message: Message) -> None:
        """Queue a message from within the cell. Loop thread only."""
        self.arrived.append((actor, message))
        if not self._is_delivering:
            self._waking.set()

    def _deliver(self) -> None:
        """Deliver what has arrived, and what follows from it."""
        self._is_delivering = True
        self._counting.want()
        try:
            while self.arrived:
                actor, message = self.arrived.popleft()
                actor.receive(message)
        finally:
            self._is_delivering = False


class _CellMailbox:
    """A mailbox for messages from within the tier's cell. Never full."""

    def __init__(self, cell: TierCell, actor: Actor | BackendDriver) -> None:
        self._cell = cell
        self._actor = actor

    def post(self, message: Message) -> bool:
        """Take the message."""
        self._cell._later(self._actor, message)  # noqa: SLF001 - the cell's own mailbox
        return True


def innermost(error: BaseException) -> BaseException:
    """Return the first real error in a task group's exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def reason_of(error: BaseException) -> str:
    """Return why a life ended, as it is told and logged."""
    cause = innermost(error)
    return printable(f"{type(cause).__name__}: {cause}")
