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
from typing import TYPE_CHECKING, Final, TypeVar

import anyio

from kvtier import messages as m
from kvtier.backend import LoadBlock, Loaded, Outcome, StoreBlock, block_digest
from kvtier.errors import InternalError, StoreFault
from kvtier.logs import log
from kvtier.policies.actor import PolicyActor
from kvtier.secondary_tier import SecondaryTier
from kvtier.threads import Bell, DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anyio.abc import TaskGroup

    from kvtier.actor import Actor, Mailbox
    from kvtier.backend import Backend
    from kvtier.memory import SlotMemory
    from kvtier.messages import Message
    from kvtier.policies.base import EvictionPolicy

T = TypeVar("T")

RESTART_PAUSE_S: Final = 1.0
RESTART_PAUSE_S_MAX: Final = 60.0
"""How long a cell that broke waits before it begins anew: doubled each time, up to this."""

QUIET_POLL_S: Final = 0.1
ABANDON_S: Final = 0.5
CLOSE_BACKEND_S: Final = 2.0

DIGEST_THREADS: Final = 2
"""Digests hold the GIL: a second thread only keeps one job from waiting for another."""

CONTENTS_A_PAUSE: Final = 512
CONTENTS_PAUSE_S: Final = 0.002
"""So many blocks found at the start are passed on at a time: a million in some seconds."""

DIGEST_INLINE_BYTES_MAX: Final = 4 << 20
"""Up to here (under half a millisecond) a hand-over to a thread costs more than the digest."""


class TierCell:
    """Runs one tier's actors and its backend. ``start`` and ``close`` belong to the owner.

    When an actor raises, or the backend can't be opened, the link is told, the
    cell waits until none of its threads can touch a slot, and after a pause
    begins anew with fresh actors.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        memory: SlotMemory,
        link: Mailbox,
        *,
        messages_max: int,
        make_backend: Callable[[], Backend],
        make_policy: Callable[[], EvictionPolicy] | None = None,
    ) -> None:
        """``backend`` serves first; ``make_backend`` makes another for each new beginning."""
        self.name = name
        self.backend = backend
        self._make_backend = make_backend
        self._memory = memory
        self._link = link
        self._messages_max = messages_max
        self._make_policy = make_policy
        self._arrived: deque[tuple[Actor | BackendDriver, Message]] = deque()
        self._taking = threading.Lock()
        self._is_taking = True
        # Two ways to have the loop look for messages: from other threads, and from its own.
        self._bell = Bell()
        self._wake_from_inside: Callable[[], None] = lambda: None
        self._is_woken = False
        self._ending = threading.Event()
        self._abandoned = False
        self._broke_of: str | None = None  # why the cell is cut off, as it is in the log
        self._build()
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{name}", daemon=True)

    def _build(self) -> None:
        """Make fresh actors, and wire them to one another."""
        self._driver = BackendDriver(
            self.name, self.backend, self._memory, lambda message: self._later(self._tier, message)
        )
        self._tier = SecondaryTier(self.name, self.backend.traits)
        self._tier.link = self._link
        self._tier.driver = _CellMailbox(self, self._driver)
        if self._make_policy is not None:
            policy = PolicyActor(f"policy:{self.name}", self._make_policy())
            policy.host = _CellMailbox(self, self._tier)
            self._tier.policy = _CellMailbox(self, policy)

    def start(self) -> None:
        """Start the thread. The backend is opened on it; nothing here waits for that."""
        self._thread.start()

    def post(self, message: Message) -> bool:
        """Take a message for the tier's actor, from any thread. The cell is its mailbox.

        It is delivered after the next ``wake``. False: ``messages_max``
        messages wait, or the cell is ending or cut off.
        """
        # Under the lock: a message must not slip in behind the clearing of a cell
        # that broke, and be carried out by the next one for slots long given away.
        with self._taking:
            if not self._is_taking or len(self._arrived) >= self._messages_max:
                return False
            self._arrived.append((self._tier, message))
        return True

    def wake(self) -> None:
        """Have what was posted delivered. Any thread; the scheduler does it once a step."""
        if self._arrived and not self._is_woken:
            self._is_woken = True
            self._bell.ring()

    def ask_to_end(self) -> None:
        """Take nothing more, end what was begun, then end. Returns at once."""
        with self._taking:
            self._is_taking = False
        self._ending.set()
        self._bell.ring()

    def close(self, timeout_s: float) -> bool:
        """Ask the cell to end and wait up to ``timeout_s``. False: something still runs.

        False means that a thread of the tier may still touch the slots: the
        memory must stay mapped. What was begun may take all of the time but
        the last ``ABANDON_S``; then it is given up.
        """
        self.ask_to_end()
        self._thread.join(max(0.0, timeout_s - ABANDON_S))
        if self._thread.is_alive():
            self._abandoned = True
            self._bell.ring()
            self._thread.join(min(timeout_s, ABANDON_S))
        return not self._thread.is_alive() and self._driver.is_quiet()

    def _later(self, actor: Actor | BackendDriver, message: Message) -> None:
        """Queue a message from within the cell. Loop thread only."""
        self._arrived.append((actor, message))
        self._wake_from_inside()

    # --- the cell's thread ---

    def _run(self) -> None:
        pause_s = RESTART_PAUSE_S
        while not self._ending.is_set():
            try:
                if self._broke_of is not None:
                    self._begin_anew()
                anyio.run(self._live)
            except Exception as error:  # noqa: BLE001 - a bug in a tier must not reach the engine
                self._break_down(error)
                if self._ending.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, RESTART_PAUSE_S_MAX)

    def _break_down(self, error: Exception) -> None:
        with self._taking:
            self._is_taking = False
            self._arrived.clear()
        cause = _innermost(error)
        reason = f"{type(cause).__name__}: {cause}"
        if reason != self._broke_of:
            self._broke_of = reason
            log.error("tier broke", tier=self.name, error=reason)
        self._link.post(m.TierBroke(reason=reason))
        self._driver.stop()
        while not self._driver.is_quiet():
            if self._ending.wait(QUIET_POLL_S):
                return
        self._link.post(m.TierFenced())

    def _begin_anew(self) -> None:
        """Replace the actors, and the backend: a closed one isn't opened again."""
        self.backend = self._make_backend()
        self._build()

    def _back_again(self) -> None:
        """Take messages again, after the backend of a cell that broke could be opened."""
        if self._broke_of is not None:
            log.warning("tier is back", tier=self.name)
            self._broke_of = None
            with self._taking:
                self._is_taking = not self._ending.is_set()
            self._link.post(m.TierRestarted())

    async def _live(self) -> None:
        """Open the backend and deliver messages until the cell is to end."""
        event = anyio.Event()
        loop = asyncio.get_running_loop()

        def rung() -> None:
            self._bell.answer()
            event.set()

        loop.add_reader(self._bell.descriptor, rung)
        self._wake_from_inside = lambda: event.set()  # noqa: PLW0108 - it changes
        self.backend.on_lost = self._driver.tell_lost
        await self.backend.open()
        self._back_again()
        try:
            async with anyio.create_task_group() as tasks:
                self._driver.tasks = tasks
                if self.backend.traits.capacity_blocks is not None:
                    tasks.start_soon(self._driver.tell_contents)
                while True:
                    event = anyio.Event()
                    self._is_woken = False
                    while self._arrived:
                        actor, message = self._arrived.popleft()
                        actor.receive(message)
                    if self._abandoned or (self._ending.is_set() and self._tier.is_idle()):
                        break
                    await event.wait()
                tasks.cancel_scope.cancel()
        finally:
            loop.remove_reader(self._bell.descriptor)
            self._wake_from_inside = lambda: None
            self._driver.stop()
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_BACKEND_S):
                await self.backend.close()


class _CellMailbox:
    """A mailbox for messages from within the tier's cell. Never full."""

    def __init__(self, cell: TierCell, actor: Actor | BackendDriver) -> None:
        self._cell = cell
        self._actor = actor

    def post(self, message: Message) -> bool:
        """Take the message."""
        self._cell._later(self._actor, message)  # noqa: SLF001 - the cell's own mailbox
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

    def tell_lost(self, keys: Sequence[bytes]) -> None:
        """Pass on that blocks are gone. Loop thread only."""
        self._report(m.ContentsLost(keys=tuple(keys)))

    async def tell_contents(self) -> None:
        """Pass on what the backend has from before, slowly enough for the scheduler's steps.

        Meanwhile the tier says that it lacks what it has not been told of yet.
        """
        told = 0
        for keys in self._backend.contents():
            self._report(m.ContentsFound(keys=tuple(keys)))
            told += len(keys)
            if told >= CONTENTS_A_PAUSE:
                told = 0
                await anyio.sleep(CONTENTS_PAUSE_S)

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
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
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

        blocks = await self._digest(len(views), with_digests)
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

        outcomes = await self._digest(len(views), checked)
        damaged = [k for k, o in zip(message.keys, outcomes, strict=True) if o is Outcome.DAMAGED]
        if damaged:
            await self._remove_damaged(damaged)
        return outcomes

    async def _digest(self, blocks: int, work: Callable[[], T]) -> T:
        """Run ``work``, which digests that many blocks: here, or in a thread if it takes long."""
        if blocks * self._memory.block_bytes <= DIGEST_INLINE_BYTES_MAX:
            return work()
        return await self._digests.run(work)

    async def _remove_damaged(self, keys: list[bytes]) -> None:
        """Delete bad copies. That this fails too takes nothing from the other blocks."""
        try:
            await self._backend.remove(keys)
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
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


def _innermost(error: BaseException) -> BaseException:
    """Return the first real error in a task group's exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
