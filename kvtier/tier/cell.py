"""Runs the cell of one secondary tier: its actors, and the event loop that drives them.

A cell lives once, on the loop of its host: a thread (``kvtier/hosts/thread_host.py``)
or a process of its own (``kvtier/hosts/process_host.py``). It delivers messages to
the tier's actors, and lets their driver run the backend's coroutines. When an
actor raises, or the backend can't be opened, the life ends with that error;
the host decides what follows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

import anyio

from kvtier.core import wire
from kvtier.core.backend_counts import Counting
from kvtier.core.policy_actor import PolicyActor
from kvtier.errors import StorageUnusable
from kvtier.plugin_api.log import printable
from kvtier.plugin_api.metrics import gauges_in
from kvtier.tier.backend_driver import BackendDriver
from kvtier.tier.bounded_tier import BoundedTier
from kvtier.tier.unbounded_tier import UnboundedTier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.core.actor import Actor, Mailbox
    from kvtier.core.wire import Message
    from kvtier.plugin_api.backend import Backend, Connection
    from kvtier.plugin_api.eviction_policy import EvictionPolicy
    from kvtier.plugin_api.slot_memory import SlotMemory

CLOSE_BACKEND_S: Final = 2.0


class _LifeEnds(Exception):
    """Not an error: the cell is to end, and its running tasks are cancelled."""


class LoopWaker(Protocol):
    """Wakes the loop from outside."""

    @property
    def descriptor(self) -> int:
        """A file that is readable once the loop has been woken."""

    def clear(self) -> None:
        """Clear the wake-up; take in new messages, if it carries them. Loop thread only."""


class TierCell:
    """One life of a tier's actors and its backend."""

    def __init__(  # noqa: PLR0913 - what its host has for it
        self,
        name: str,
        backend: Backend,
        memory: SlotMemory,
        link: Mailbox,
        make_policy: Callable[[], EvictionPolicy] | None,
        fallback_policy: Callable[[int], EvictionPolicy],
        may_announce: Callable[[], bool] = lambda: True,
        *,
        beside_scheduler: bool = True,
    ) -> None:
        """``make_policy``: None if nothing is ever evicted. ``may_announce``: the link keeps up.

        ``beside_scheduler``: the engine's scheduler runs in this process.
        """
        self.arrived: deque[tuple[Actor | BackendDriver, Message]] = deque()
        self._is_woken = False  # since the last delivery
        self._backend = backend
        self._memory = memory
        self._link = link
        self._is_delivering = False
        self._waking: anyio.Event  # set when there is something to deliver
        to_tier, to_driver, to_policy = (_CellMailbox(self) for _ in range(3))
        self.driver = BackendDriver(
            name, backend, memory, to_tier.post, may_announce, beside_scheduler=beside_scheduler
        )
        self._counting = Counting(name, self.driver.counters, gauges_in(backend.metrics), link)
        self._tier: BoundedTier | UnboundedTier
        if make_policy is None:
            self._tier = UnboundedTier(name, backend.traits, link=link, driver=to_driver)
        else:
            self._tier = BoundedTier(
                name, backend.traits, link=link, driver=to_driver, policy=to_policy
            )
            to_policy.belong_to(
                PolicyActor(f"policy:{name}", make_policy(), fallback_policy, to_tier)
            )
        to_tier.belong_to(self._tier)
        to_driver.belong_to(self.driver)

    def post(self, message: Message) -> None:
        """Take a message for the tier's actor. Any thread; wake the loop afterwards."""
        self.arrived.append((self._tier, message))

    def wants_waking(self) -> bool:
        """Return whether to wake the loop for new messages: once until it is awake."""
        if not self.arrived or self._is_woken:
            return False
        self._is_woken = True
        return True

    async def live(
        self,
        waker: LoopWaker,
        *,
        opened: Callable[[Mapping[str, int]], None],
        is_ending: Callable[[], bool],
        is_abandoned: Callable[[], bool],
    ) -> None:
        """Open the backend and deliver messages until the cell is to end.

        ``opened`` is called once the backend is open, with its gauges.
        ``is_ending``: end when nothing is at the backend;
        ``is_abandoned``: end now.
        """
        loop = asyncio.get_running_loop()

        def woken() -> None:
            waker.clear()
            self._waking.set()

        self._waking = anyio.Event()
        loop.add_reader(waker.descriptor, woken)
        self._backend.on_lost = self.driver.report_lost
        self._backend.on_wanted = self.driver.requests.want
        self._backend.on_wanted_no_more = self.driver.requests.want_no_more
        self._backend.on_connection = self._tell_connection
        await self._backend.open()
        try:
            await self._backend.register_memory(self._memory.buffer)
            opened(await self._counting.gauges())
            await self._serve(lambda: is_abandoned() or (is_ending() and self._has_finished()))
        except* _LifeEnds:
            pass
        finally:
            loop.remove_reader(waker.descriptor)
            self.driver.stop()
            with anyio.CancelScope(shield=True):
                await self._counting.end()
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_BACKEND_S):
                await self._backend.close()

    def _has_finished(self) -> bool:
        """Return whether nothing is at the backend any more, now that nothing new comes."""
        if isinstance(self._tier, UnboundedTier):
            self._tier.finish()
        return self._tier.is_idle()

    def _tell_connection(self, state: Connection) -> None:
        self._link.post(wire.ConnectionChanged(state))

    async def _serve(self, is_over: Callable[[], bool]) -> None:
        """Deliver messages and run batches. Ends with ``_LifeEnds``, or with the error."""
        # asyncio's own group: anyio's takes four times as long to start a task, one per batch.
        async with asyncio.TaskGroup() as tasks:
            self.driver.begin(tasks)
            tasks.create_task(self._counting.go_on())
            while True:
                self._waking = anyio.Event()
                self._is_woken = False
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
        """Deliver the messages that have arrived, and those that they cause."""
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

    def __init__(self, cell: TierCell) -> None:
        self._cell = cell
        self._actor: Actor | BackendDriver

    def belong_to(self, actor: Actor | BackendDriver) -> None:
        """Have the messages delivered to ``actor``. Once, before the first one is posted."""
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
    """Return why a life ended, as it is reported and logged."""
    cause = innermost(error)
    is_sentence = isinstance(cause, StorageUnusable)
    return printable(str(cause) if is_sentence else f"{type(cause).__name__}: {cause}")
