"""The cell of one secondary tier: an anyio event loop in a daemon thread.

It delivers messages to the tier's actors, and runs the backend's coroutines.
The driver here is the only place where a slot number becomes memory. It
computes the digest of what is stored and checks the digest of what was
loaded, so a backend can't serve wrong bytes, only lose right ones.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import anyio
import structlog

from kvtier import messages as m
from kvtier.backend import LoadBlock, Loaded, Outcome, StoreBlock, block_digest
from kvtier.errors import InternalError, StoreFault
from kvtier.policies.actor import PolicyActor
from kvtier.secondary_tier import SecondaryTier
from kvtier.threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskGroup

    from kvtier.actor import Actor, Mailbox
    from kvtier.backend import Backend
    from kvtier.memory import SlotMemory
    from kvtier.messages import Message
    from kvtier.policies.base import EvictionPolicy

log = structlog.get_logger("kvtier")

DIGEST_THREADS: Final = 2
"""Digests run at memory speed and release the GIL: more threads would only wait for memory."""


class TierCell:
    """Runs one tier's actors and its backend. ``start`` and ``close`` belong to the owner."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        memory: SlotMemory,
        link: Mailbox,
        *,
        messages_max: int,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.name = name
        self.backend = backend
        self._link = link
        self._messages_max = messages_max
        self._arrived: deque[tuple[Actor | BackendDriver, Message]] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._stopping = False
        self._driver = BackendDriver(name, backend, memory, self._from_driver)
        self._tier = SecondaryTier(name, backend.traits)
        self._tier.link = link
        self._tier.driver = _CellMailbox(self, self._driver)
        if policy is not None:
            actor = PolicyActor(f"policy:{name}", policy)
            actor.host = _CellMailbox(self, self._tier)
            self._tier.policy = _CellMailbox(self, actor)
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{name}", daemon=True)

    @property
    def mailbox(self) -> Mailbox:
        """Where the link posts. Any thread; refuses when ``messages_max`` are waiting."""
        return _BoundedMailbox(self, self._tier, self._messages_max)

    def start(self) -> None:
        """Start the thread. The backend is opened on it; nothing here waits for that."""
        self._thread.start()

    def ask_to_end(self) -> None:
        """Ask the cell to end. Returns at once."""
        self._stopping = True
        self._wake()

    def close(self, timeout_s: float) -> bool:
        """Ask the cell to end and wait up to ``timeout_s``. False: something still runs.

        False means that a thread of the tier may still touch the slots: the
        memory must stay mapped.
        """
        self.ask_to_end()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._driver.is_quiet()

    def deliver_later(self, actor: Actor | BackendDriver, message: Message) -> None:
        """Queue a message, from any thread, and wake the loop."""
        self._arrived.append((actor, message))
        self._wake()

    def has_ended(self) -> bool:
        """Tell whether nothing will be delivered any more."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def waiting(self) -> int:
        """How many messages wait."""
        return len(self._arrived)

    def _from_driver(self, message: Message) -> None:
        self.deliver_later(self._tier, message)

    def _run(self) -> None:
        try:
            anyio.run(self._main)
        except BaseException as error:
            log.exception("tier broke", tier=self.name)
            self._link.post(m.TierBroke(reason=f"{type(error).__name__}: {error}"))
        self._driver.stop()
        if self._driver.is_quiet():
            self._link.post(m.TierFenced())

    async def _main(self) -> None:
        event = anyio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            # From any thread. Closed: the loop is gone, and so is what would be woken.
            try:
                loop.call_soon_threadsafe(lambda: event.set())
            except RuntimeError:
                return

        self._wake = wake
        await self.backend.open()
        async with anyio.create_task_group() as tasks:
            self._driver.tasks = tasks
            while not self._stopping:
                event = anyio.Event()
                while self._arrived:
                    actor, message = self._arrived.popleft()
                    actor.receive(message)
                if not self._stopping:
                    await event.wait()
            tasks.cancel_scope.cancel()
        await self.backend.close()


class _CellMailbox:
    """A mailbox for messages from within the tier's cell. Never full."""

    def __init__(self, cell: TierCell, actor: Actor | BackendDriver) -> None:
        self._cell = cell
        self._actor = actor

    def post(self, message: Message) -> bool:
        """Take the message."""
        self._cell.deliver_later(self._actor, message)
        return True


class _BoundedMailbox:
    """The tier's mailbox for the engine cell."""

    def __init__(self, cell: TierCell, actor: Actor, messages_max: int) -> None:
        self._cell = cell
        self._actor = actor
        self._messages_max = messages_max

    def post(self, message: Message) -> bool:
        """Take the message, unless too many wait or the cell has ended."""
        if self._cell.waiting() >= self._messages_max or self._cell.has_ended():
            return False
        self._cell.deliver_later(self._actor, message)
        return True


class BackendDriver:
    """Runs the backend's coroutines, one task a part, and checks what they bring.

    Whatever the backend raises or answers, each part ends with one outcome a
    block; a part whose call hangs doesn't end.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        memory: SlotMemory,
        report: Callable[[Message], None],
    ) -> None:
        self.tasks: TaskGroup
        self._name = name
        self._backend = backend
        self._memory = memory
        self._report = report
        self._digests = DaemonThreads(DIGEST_THREADS, f"kvtier-{name}-digest")
        self._raised: set[str] = set()  # kinds of exception that are in the log already

    def receive(self, message: Message) -> None:
        """Start the part's task. Loop thread only."""
        if not isinstance(message, m.ProbePart | m.LoadPart | m.StorePart):
            raise InternalError(f"a driver does not understand {type(message).__name__}")
        self.tasks.start_soon(self._run, message)

    def is_quiet(self) -> bool:
        """Tell whether no thread of the driver or the backend may touch a slot any more."""
        return self._digests.busy() == 0 and self._backend.busy_threads() == 0

    def stop(self) -> None:
        """Let the digest threads end."""
        self._digests.stop()

    async def _run(self, message: m.ProbePart | m.LoadPart | m.StorePart) -> None:
        started = time.perf_counter()
        try:
            if isinstance(message, m.LoadPart):
                outcomes = await self._load(message)
            elif isinstance(message, m.StorePart):
                outcomes = await self._store(message)
            else:
                present = await self._backend.probe(message.keys)
                outcomes = tuple(Outcome.DONE if each else Outcome.ABSENT for each in present)
        except Exception as error:
            self._log_once(error, type(message).__name__)
            outcomes = (Outcome.FAILED,) * len(message.keys)
        seconds = time.perf_counter() - started
        self._report(m.PartEnded(part=message.part, outcomes=outcomes, seconds=seconds))

    async def _store(self, message: m.StorePart) -> tuple[Outcome, ...]:
        views = self._memory.views(message.slots)

        def with_digests() -> list[StoreBlock]:
            return [
                StoreBlock(key, view.toreadonly(), block_digest(key, view))
                for key, view in zip(message.keys, views, strict=True)
            ]

        blocks = await self._digests.run(with_digests)
        if message.remove:
            await self._backend.remove(message.remove)
        outcomes = tuple(Outcome(each) for each in await self._backend.store(blocks))
        _expect(len(outcomes), len(blocks))
        return outcomes

    async def _load(self, message: m.LoadPart) -> tuple[Outcome, ...]:
        views = self._memory.views(message.slots)
        blocks = [LoadBlock(k, v) for k, v in zip(message.keys, views, strict=True)]
        loaded = await self._backend.load(blocks)
        _expect(len(loaded), len(blocks))
        accepts_unchecked = self._backend.traits.accepts_unchecked

        def checked() -> tuple[Outcome, ...]:
            return tuple(
                _checked(block, answer, accepts_unchecked=accepts_unchecked)
                for block, answer in zip(blocks, loaded, strict=True)
            )

        outcomes = await self._digests.run(checked)
        damaged = [k for k, o in zip(message.keys, outcomes, strict=True) if o is Outcome.DAMAGED]
        if damaged:
            await self._remove_damaged(damaged)
        return outcomes

    async def _remove_damaged(self, keys: list[bytes]) -> None:
        """Delete bad copies. That this fails too takes nothing from the other blocks."""
        try:
            await self._backend.remove(keys)
        except Exception as error:
            self._log_once(error, "removal of damaged blocks")

    def _log_once(self, error: Exception, what: str) -> None:
        kind = type(error).__name__
        if kind not in self._raised:
            self._raised.add(kind)
            log.warning("backend raised", tier=self._name, part=what, error=f"{kind}: {error}")


def _expect(answers: int, blocks: int) -> None:
    if answers != blocks:
        raise StoreFault(f"{answers} answers for {blocks} blocks")


def _checked(block: LoadBlock, loaded: Loaded, *, accepts_unchecked: bool) -> Outcome:
    """Return what the load is worth once the bytes have been compared with their digest."""
    outcome = Outcome(loaded.outcome)
    if outcome is not Outcome.DONE:
        return outcome
    if loaded.digest is None:
        return Outcome.DONE if accepts_unchecked else Outcome.DAMAGED
    sound = block_digest(block.key, block.buffer) == loaded.digest
    return Outcome.DONE if sound else Outcome.DAMAGED
