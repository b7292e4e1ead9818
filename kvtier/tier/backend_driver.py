"""Runs a backend's coroutines for its tier, and checks their results.

The driver is the only place where a slot number becomes memory. It computes
the digest of each stored block and checks the digest of each loaded one, so a
backend can't serve wrong bytes, only lose right ones.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from itertools import compress, islice
from typing import TYPE_CHECKING, Final, TypeVar

import anyio

from kvtier.errors import InternalError, StoreFault
from kvtier.plugin_api.backend import (
    DIGEST_STEP_BYTES,
    LoadBlock,
    Loaded,
    Outcome,
    StoreBlock,
    block_digest,
)
from kvtier.plugin_api.deadlines import NEVER, set_deadline
from kvtier.plugin_api.log import log, printable
from kvtier.plugin_api.store_turns import StoreTurns
from kvtier.plugin_api.threads import DaemonThreads
from kvtier.tier import driver_messages as d
from kvtier.tier.leftovers import Unannounced
from kvtier.tier.open_requests import OF_REQUESTS, OpenRequests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.core.wire import Message
    from kvtier.plugin_api.backend import Backend
    from kvtier.plugin_api.slot_memory import SlotMemory

T = TypeVar("T")

DIGEST_THREADS: Final = 2
"""Beside a scheduler, digests hold the GIL: a second thread only keeps one job from waiting for
another. In the tier's own process they don't, and two keep up with several disks."""

FREE_DIGEST_BYTES_MIN: Final = 256 << 10
"""From this block size on, a digest takes longer than handing over the GIL."""

CONTENTS_A_PAUSE: Final = 512
CONTENTS_PAUSE_S: Final = 0.002
"""Blocks in one announcement, of those found at the start (a million take some seconds) and of lost
ones."""

COUNTERS_MAX: Final = 500
COUNT_MAX: Final = 2**63
"""Each backend counter becomes a Prometheus series, and is sent there as MessagePack."""

DIGEST_INLINE_BYTES_MAX: Final = 4 << 20
"""Up to this size (under half a millisecond) a thread hand-over costs more than the digest."""


class BackendDriver:
    """Runs the backend's coroutines, with a task for each batch, and checks their results.

    Whatever the backend raises or returns, each batch ends with one outcome per
    block; a batch whose call hangs doesn't end.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        memory: SlotMemory,
        report: Callable[[Message], object],
        may_announce: Callable[[], bool] = lambda: True,
        *,
        beside_scheduler: bool = True,
    ) -> None:
        """``report``: sends to the tier's actor. ``may_announce``: whether the link keeps up.

        ``beside_scheduler``: the engine's scheduler runs in this process, and needs its GIL.
        """
        self._tasks: asyncio.TaskGroup
        self._may_announce = may_announce
        self._name = name
        self._backend = backend
        self._memory = memory
        self._report = report
        self._frees_gil = not beside_scheduler and memory.block_bytes >= FREE_DIGEST_BYTES_MIN
        self._step_bytes = memory.block_bytes if self._frees_gil else DIGEST_STEP_BYTES
        self._digests = DaemonThreads(DIGEST_THREADS, f"kvtier-{name}-digest")
        # Threads of their own, or a load would wait for the digests of all earlier stores.
        self._checks = DaemonThreads(DIGEST_THREADS, f"kvtier-{name}-check")
        self._turns = backend.store_turns = StoreTurns()
        self._unannounced = Unannounced()
        if backend.traits.capacity_blocks is None:
            self._unannounced.end()  # its tier keeps no index to announce anything to
        self.requests = OpenRequests(backend, report, self._log_once)
        self._raised: set[str] = set()  # kinds of exception already logged

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Run batches as tasks of this group from now on."""
        self._tasks = tasks

    def receive(self, message: Message) -> None:
        """Start the batch's task. Loop thread only."""
        if isinstance(message, d.AnnounceContents):
            self._tasks.create_task(self.announce_contents(message.keys))
            return
        if isinstance(message, OF_REQUESTS):
            # As a task: they start in their order, so that a request ends after its last call.
            self._tasks.create_task(self.requests.receive(message))
            return
        if not isinstance(message, d.ProbeBatch | d.LoadBatch | d.StoreBatch | d.RemoveBatch):
            raise InternalError(f"a driver does not understand {type(message).__name__}")
        self._tasks.create_task(self._run(message))

    def report_lost(self, keys: Sequence[bytes]) -> None:
        """Report that blocks are gone, in messages too short to hold up a step.

        Loop thread only.
        """
        self._unannounced.removed(keys)
        for some in _batches(tuple(keys)):
            self._report(d.ContentsLost(keys=some))

    async def announce_contents(self, again: tuple[bytes, ...] = ()) -> None:
        """Announce the blocks that the backend has from before, at a pace the scheduler can take.

        Meanwhile the tier looks up keys that it does not know in the backend.
        """
        announced = 0
        for keys in _batches(again) if again else self._backend.contents():
            found = self._unannounced.still_there(keys)
            self._report(d.ContentsFound(found, again=bool(again)))
            announced += len(keys)
            if announced >= CONTENTS_A_PAUSE:
                announced = 0
                await anyio.sleep(CONTENTS_PAUSE_S)
                # Otherwise answers would queue up behind. No event signals that it has drained.
                while not self._may_announce():  # noqa: ASYNC110
                    await anyio.sleep(CONTENTS_PAUSE_S)
        if not again:
            self._unannounced.end()
            self._report(d.ContentsAnnounced())

    def is_quiet(self) -> bool:
        """Return whether no thread of the driver or the backend may touch a slot any more.

        A backend whose ``busy_threads`` raises counts as touching them. Any thread.
        """
        try:
            ours = self._digests.busy() + self._checks.busy()
            return ours == 0 and self._backend.busy_threads() == 0
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            self._log_once(error, "busy_threads")
            return False

    def counters(self) -> dict[str, int]:
        """Return the backend's own counts, none if it raises. Any thread; it may hang.

        Only values that can be sent and shown: whole numbers under names that are text.
        """
        try:
            counted = islice(self._backend.counters().items(), COUNTERS_MAX)
            counts = {printable(str(name)): int(count) for name, count in counted}
            return {name: count for name, count in counts.items() if abs(count) < COUNT_MAX}
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            self._log_once(error, "counters")
            return {}

    def stop(self) -> None:
        """Stop the digest threads."""
        self._digests.stop()
        self._checks.stop()

    async def _run(
        self, message: d.ProbeBatch | d.LoadBatch | d.StoreBatch | d.RemoveBatch
    ) -> None:
        started = time.perf_counter()
        if not isinstance(message, d.RemoveBatch) and message.deadline != NEVER:
            set_deadline(message.deadline)  # of this task alone
        try:
            if isinstance(message, d.LoadBatch):
                outcomes = await self._load(message)
            elif isinstance(message, d.StoreBatch):
                outcomes = await self._store(message)
            elif isinstance(message, d.RemoveBatch):
                await self._remove(message.keys)
                outcomes = (Outcome.DONE,) * len(message.keys)
            else:
                outcomes = await self._probe(message)
        except BaseException as error:  # a backend may raise anything
            if _is_for_us(error):
                raise
            self._log_once(error, type(message).__name__)
            outcomes = (Outcome.FAILED,) * len(message.keys)
        seconds, at = time.perf_counter() - started, time.monotonic()
        self._report(d.BatchEnded(message.batch, outcomes, seconds, at))

    async def _probe(self, message: d.ProbeBatch) -> tuple[Outcome, ...]:
        keys = message.keys
        present = tuple(await self.requests.serving(message.request).probe(keys))
        if not self._unannounced.is_over():
            found = self._unannounced.still_there(tuple(compress(keys, present)))
            self._report(d.ContentsFound(found))
        return tuple(Outcome.DONE if each else Outcome.ABSENT for each in present)

    async def _store(self, message: d.StoreBatch) -> tuple[Outcome, ...]:
        views = self._memory.views(message.slots)
        step_bytes = self._step_bytes

        def with_digests() -> list[StoreBlock]:
            self._memory.clear_rests(message.keys, message.slots)
            return [
                StoreBlock(key, view.toreadonly(), block_digest(key, view, step_bytes))
                for key, view in zip(message.keys, views, strict=True)
            ]

        if self.requests.are_apart:
            self._memory.clear_rests(message.keys, message.slots)
            both = zip(message.keys, views, strict=True)
            blocks = [StoreBlock(key, view.toreadonly(), b"") for key, view in both]
        else:
            blocks = await self._digest(self._digests, len(views), with_digests)
        if message.remove:
            await self._remove(message.remove)
        outcomes = _outcomes(await self.requests.serving(message.request).store(blocks))
        _expect(len(outcomes), len(blocks))
        self._unannounced.stored(message.keys, outcomes)
        return outcomes

    async def _remove(self, keys: Sequence[bytes]) -> None:
        self._unannounced.removed(keys)
        await self._backend.remove(keys)

    async def _load(self, message: d.LoadBatch) -> tuple[Outcome, ...]:
        views = self._memory.views(message.slots)
        keys, step_bytes = message.keys, self._step_bytes
        accepts_unchecked = self._backend.traits.accepts_unchecked
        computed: list[bytes | None] = [None] * len(keys)  # by the threads that read

        def compute(place: int) -> None:
            computed[place] = block_digest(keys[place], views[place], step_bytes)

        both = zip(keys, views, strict=True)
        if self._frees_gil:
            blocks = [
                LoadBlock.with_report(key, view, partial(compute, place))
                for place, (key, view) in enumerate(both)
            ]
        else:  # it would only be held by more threads
            blocks = [LoadBlock(key, view) for key, view in both]

        def checked() -> tuple[Outcome, ...]:
            return tuple(
                _checked(block, answer, digest, step_bytes, accepts_unchecked=accepts_unchecked)
                for block, answer, digest in zip(blocks, loaded, computed, strict=True)
            )

        # Not while damaged blocks are removed: that may wait for a thread that stores.
        with self._turns.loading():
            loaded = await self.requests.serving(message.request).load(blocks)
            _expect(len(loaded), len(blocks))
            outcomes = await self._digest(self._checks, computed.count(None), checked)
        damaged = [k for k, o in zip(keys, outcomes, strict=True) if o is Outcome.DAMAGED]
        if damaged:
            await self._remove_damaged(damaged)
        return outcomes

    async def _digest(self, threads: DaemonThreads, blocks: int, work: Callable[[], T]) -> T:
        """Run ``work``, which digests that many blocks: here, or in a thread if it takes long."""
        size = blocks * self._memory.block_bytes
        if not size or (size <= DIGEST_INLINE_BYTES_MAX and not self._frees_gil):
            return work()
        return await threads.run(work)

    async def _remove_damaged(self, keys: list[bytes]) -> None:
        """Delete bad copies. If this fails too, the other blocks are unaffected."""
        try:
            await self._remove(keys)
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            self._log_once(error, "removal of damaged blocks")

    def _log_once(self, error: BaseException, what: str) -> None:
        kind = type(error).__name__
        if kind not in self._raised:
            self._raised.add(kind)
            log.warning("backend raised", tier=self._name, batch=what, error=f"{kind}: {error}")


def _batches(keys: tuple[bytes, ...]) -> Iterator[tuple[bytes, ...]]:
    for start in range(0, len(keys), CONTENTS_A_PAUSE):
        yield keys[start : start + CONTENTS_A_PAUSE]


def _is_for_us(error: BaseException) -> bool:
    """Return whether the error ends this task, and is not the backend's own."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, GeneratorExit)


def _expect(answers: int, blocks: int) -> None:
    if answers != blocks:
        raise StoreFault(f"{answers} answers for {blocks} blocks")


def _outcomes(answers: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the backend's outcomes. Raises ``ValueError`` for a value that is not an outcome."""
    if answers.count(Outcome.DONE) == len(answers):
        return (Outcome.DONE,) * len(answers)
    return tuple(map(Outcome, answers))


def _checked(
    block: LoadBlock,
    loaded: Loaded,
    computed: bytes | None,
    step_bytes: int,
    *,
    accepts_unchecked: bool,
) -> Outcome:
    """Return the load's outcome after comparing the bytes with their digest.

    ``computed``: the digest of the bytes, None if no thread has computed it yet.
    """
    outcome, digest = loaded.outcome, loaded.digest
    if outcome is not Outcome.DONE and Outcome(outcome) is not Outcome.DONE:
        return Outcome(outcome)
    if digest is None:
        return Outcome.DONE if accepts_unchecked else Outcome.DAMAGED
    if computed is None:
        computed = block_digest(block.key, block.buffer, step_bytes)
    return Outcome.DONE if computed == digest else Outcome.DAMAGED
