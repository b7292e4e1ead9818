"""Offers one tier to another program's tiering: synchronous calls that never wait for the tier.

Like ``kvtier/engine/facade.py``, but the primary tier is the program's own: the bytes
of a job go through staging slots (``kvtier/engine/staged/staged_tier.py``). All methods belong to
one thread at a time.

If the tier's actor breaks, lookups find no block any more, and every job finishes as failed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

from kvtier.core import messages as m
from kvtier.core import staging_messages as s
from kvtier.core import wire
from kvtier.core.actor import Mailbox
from kvtier.core.block_state import BlockState
from kvtier.engine.cell import NO_REPLY, EngineCell
from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier.core.events import Event
    from kvtier.core.generations import Generations
    from kvtier.core.statistics import TierStatistics
    from kvtier.core.tier_host import TierHost
    from kvtier.core.wire import Message
    from kvtier.engine.link.tier_link import TierLink
    from kvtier.engine.staged.staged_tier import StagedTier
    from kvtier.plugin_api.keys import Key, RequestId

DRAIN_POLL_S: Final = 0.001

COPY_WAIT_BYTES_MAX: Final = 4 << 20
"""Copies of up to this size, half a millisecond, are waited for: else they cost a whole step."""


class Copier(Mailbox, Protocol):
    """Carries out ``CopyBlocks`` messages, one after the other."""

    def backlog_bytes(self) -> int:
        """Return the number of bytes still to copy."""

    def wait_idle(self) -> None:
        """Wait until every copy has ended. That depends on memory only, not on storage."""

    def stop(self) -> None:
        """End every copy, and release the program's slots."""


class StagedEngine(NamedTuple):
    """The actors of one staged tier, wired to one another."""

    cell: EngineCell
    staged: StagedTier
    link: TierLink


class StagedFacade:
    """One tier behind another program's primary tier. Built by ``kvtier.runtime``."""

    def __init__(
        self,
        engine: StagedEngine,
        tier: TierHost,
        copier: Copier,
        *,
        close_timeout_s: float,
        generations: Generations,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cell, self._staged, self._link = engine
        self._cell.tell_time(clock, [self._link.time])
        self._tier = tier
        self._copier = copier
        self._close_timeout_s = close_timeout_s
        self._generations = generations
        self._clock = clock
        self._unfinished: dict[int, tuple[bool, tuple[Key, ...]]] = {}
        self._finished: list[s.Finished] = []
        self._is_closed = False
        self._let_time_pass()
        self._tier.wake()  # it is notified of the generation of weights it serves

    # --- requests and lookups ---

    def on_request_started(self, request: RequestId) -> None:
        """Begin a request: lookups find no block for an unknown one."""
        self._ask(m.RequestStarted(request, 1))

    def on_request_finished(self, request: RequestId, order: Iterable[Key] | None = None) -> None:
        """End a request. Its jobs may still run. ``order``: all its keys from head to tail."""
        self._ask(m.RequestFinished(request, None if order is None else tuple(order)))

    def lookup(self, key: Key, request: RequestId) -> BlockState:
        """Return READY (the tier has it), ABSENT, or PROBING: look up again in the next step.

        PROBING ends by the tier's deadline.
        """
        found = self._ask(m.Lookup(key, request))
        return BlockState.ABSENT if found is NO_REPLY else cast("BlockState", found)

    def touch(self, keys: Iterable[Key], request: RequestId) -> None:
        """Note that blocks were used, from head to tail."""
        self._ask(m.Touch(tuple(keys), request))

    # --- jobs ---

    def submit_load(
        self, job: int, request: RequestId, keys: Iterable[Key], slots: Iterable[int]
    ) -> None:
        """Begin to fill the program's slots, which it gets back when the job has finished."""
        self._submit(s.SubmitLoad(job, request, tuple(keys), tuple(slots)), is_load=True)

    def submit_store(
        self, job: int, request: RequestId, keys: Iterable[Key], slots: Iterable[int]
    ) -> None:
        """Begin to store the program's slots, whose bytes must stay until the job has finished."""
        self._submit(s.SubmitStore(job, request, tuple(keys), tuple(slots)), is_load=False)

    def _submit(self, message: s.SubmitLoad | s.SubmitStore, *, is_load: bool) -> None:
        self._let_time_pass()
        self._unfinished[message.job] = (is_load, message.keys)
        self._ask(message)

    def drain_finished(self) -> list[s.Finished]:
        """Return the jobs that have finished since the last call. Never waits for storage."""
        self._poll()
        if 0 < self._copier.backlog_bytes() <= COPY_WAIT_BYTES_MAX:
            self._copier.wait_idle()
            self._cell.run()
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def _collect(self) -> None:
        finished = self._ask(s.DrainFinished())
        if finished is NO_REPLY:
            self._fail_all()
            return
        for each in cast("list[s.Finished]", finished):
            del self._unfinished[each.job]
            self._finished.append(each)

    def _fail_all(self) -> None:
        """Finish every job of an actor that broke. A copy that it began may still run."""
        if self._unfinished:
            self._copier.wait_idle()
        for job, (is_load, keys) in self._unfinished.items():
            self._finished.append(s.Finished(job, is_load, keys, (), 0))
        self._unfinished.clear()

    def drain(self) -> None:
        """Finish every job, waiting for the tier for ``close_timeout_s`` at most.

        When it returns, none of the program's slots is touched any more. Jobs that had not ended
        by then have failed; the tier keeps their staging slots until it releases them.
        """
        deadline = time.monotonic() + self._close_timeout_s
        self._poll()
        self._collect()
        while self._unfinished and time.monotonic() < deadline:
            time.sleep(DRAIN_POLL_S)
            self._poll()
            self._collect()
        self._ask(s.GiveUp())
        self._copier.wait_idle()
        self._poll()
        self._collect()
        assert not self._unfinished, "a job that was given up has not finished"

    # --- steps ---

    def step_end(self) -> None:
        """End a step: send its probes, and let deadlines pass."""
        self._tier.poll()
        self._ask(m.StepEnd(now=self._clock()))
        self._tier.wake()

    def has_pending_work(self) -> bool:
        """Return whether more steps are useful: a job or a probe may still end in time."""
        self._poll()
        return bool(self._unfinished or self._finished or self._link.in_flight()[0])

    def take_events(self) -> list[Event]:
        """Return the tier's gains and losses since the last call, in order."""
        self._cell.run()
        return self._link.drain_events()

    @property
    def evicts(self) -> bool:
        """Whether the tier is bounded, and so reports the blocks that it evicts."""
        return self._link.tells_uses

    @property
    def faults(self) -> int:
        """How many message handlers raised."""
        return self._cell.faults

    def statistics(self) -> TierStatistics:
        """Return a frozen snapshot."""
        return self._link.statistics()

    # --- the whole ---

    def reset(self, *, weights_version: str | None = None, weights_changed: bool = False) -> None:
        """Begin a new generation, unless ``on_reset`` is ``keep``. ``drain`` first.

        This engine finds none of the blocks stored before again. The arguments are those of
        ``SchedulerFacade.reset``.
        """
        mark = self._generations.begin(weights_version, has_changed=weights_changed)
        self._ask(m.Reset(mark=mark))
        self._tier.wake()

    def close(self) -> bool:
        """End the tier, waiting at most ``close_timeout_s``. Safe to call twice.

        The program's slots are released in any case. False: the tier hangs, and may touch
        the staging slots until the process ends.
        """
        if self._is_closed:
            return True
        self._is_closed = True
        self._copier.stop()
        is_quiet = self._tier.close(self._close_timeout_s)
        if not is_quiet:
            log.warning(
                "tier did not stop within close_timeout_s; its slots stay mapped",
                tier=self._tier.name,
            )
        return is_quiet

    def _let_time_pass(self) -> None:
        self._ask(wire.Tick(now=self._clock()))

    def _poll(self) -> None:
        """Handle the messages from the tier and the copier, and let time pass."""
        self._tier.poll()
        self._cell.run()
        self._let_time_pass()
        self._tier.wake()

    def _ask(self, message: Message) -> object:
        return self._cell.ask(self._staged, message)
