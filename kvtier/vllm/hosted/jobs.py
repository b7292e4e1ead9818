"""Runs lookups and jobs of one of vLLM's tiers, and the steps that it needs.

vLLM polls its tiers for ended jobs in each of the engine's steps, and at the
step's end a tier does the work it has collected. Here the tier has steps of its
own: one at once when there is something new, then others at longer and longer
intervals, until nothing is in flight.

A job counts as in flight until the tier reports how it ended, even if no caller
waits for it any more: until then it may touch the slots.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import anyio
import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    from kvtier.vllm.hosted.stats import HostedStats

STEP_S: Final = 0.0002
"""Interval between the first steps of a tier that has something to do."""

STEP_S_MAX: Final = 0.005
"""Longest interval between later ones: the end of a long job is noticed up to this late."""

FAILED_STEP_S: Final = 1.0
"""Interval after a step in which the tier could not report which jobs had ended."""

LOOKUP_S_MAX: Final = 60.0
"""A lookup not resolved by then is abandoned. The caller has a shorter deadline."""

_UNRESOLVED: Final = (LookupResult.RETRY, LookupResult.HIT_PENDING)


class HostedJobs:
    """Jobs in flight in a tier. Loop thread only; ``under_way``, and ``forget`` at the end: any."""

    def __init__(
        self,
        tier: SecondaryTierManager,
        name: str,
        lost: Callable[[list[bytes]], None],
        stats: HostedStats | None = None,
    ) -> None:
        """``name``: the tier's, for the log. ``lost``: called with the keys that the tier removed.

        ``stats``: receives the tier's metrics.
        """
        self.unknown = 0  #: results of jobs that don't exist, or that ended before
        self._tier = tier
        self._serve_peers: tuple[Callable[[], None], ...] = ()
        self._name = name
        self._lost = lost
        self._stats = stats
        self._waiting: dict[int, asyncio.Future[JobResult]] = {}  # the jobs in flight
        self._lookups = 0  # unresolved queries
        self._next_id = 0
        self._stepped = asyncio.Event()  # replaced at each step
        self._wanted = asyncio.Event()
        self._raised: set[str] = set()  # kinds of exceptions already logged

    @property
    def under_way(self) -> int:
        """Number of jobs that may still touch their slots. Any thread."""
        return len(self._waiting)

    def also(self, *serve_peers: Callable[[], None]) -> None:
        """Call these in each step, to serve other engines."""
        self._serve_peers = serve_peers

    async def go_on(self) -> None:
        """Run steps whenever there is something to wait for, until cancelled."""
        while True:
            self._wanted.clear()
            pause_s = STEP_S
            while self._waiting or self._lookups or self._has_more_to_do():
                goes_well = self._step()
                pause_s = min(pause_s * 1.5, STEP_S_MAX) if goes_well else FAILED_STEP_S
                with anyio.move_on_after(pause_s):
                    await self._wanted.wait()
                    self._wanted.clear()
                    pause_s = STEP_S
            await self._wanted.wait()

    async def look_up(
        self, keys: Sequence[bytes], context: ReqContext, is_over: Callable[[], bool]
    ) -> list[bool]:
        """Return for each key whether the tier has it. Raises what the tier raises.

        ``is_over``: whether the result is not needed any more: then the tier is not queried again.
        """
        found = dict.fromkeys(keys, False)
        unresolved = list(found)

        def query() -> bool:
            nonlocal unresolved
            if is_over():
                return True
            results = {key: self._tier.lookup(key, context) for key in unresolved}
            found.update((key, results[key] is LookupResult.HIT) for key in unresolved)
            unresolved = [key for key in unresolved if results[key] in _UNRESOLVED]
            return not unresolved

        async with asyncio.timeout(LOOKUP_S_MAX):
            await self.repeat(query)
        return [found[key] for key in keys]

    async def run(
        self,
        submit: Callable[[TransferJob], None],
        keys: Sequence[bytes],
        slots: Sequence[int],
        context: ReqContext,
        *,
        is_promotion: bool,
    ) -> JobResult:
        """Submit a job and wait for its end. Raises what ``submit`` raises."""
        job, ended = self.new_job(keys, slots, context, is_promotion=is_promotion)
        self.submit(submit, job)
        return await asyncio.shield(ended)

    def new_job(
        self,
        keys: Sequence[bytes],
        slots: Sequence[int],
        context: ReqContext,
        *,
        is_promotion: bool,
    ) -> tuple[TransferJob, asyncio.Future[JobResult]]:
        """Return a job, in flight from now on, and the future that resolves when it ends."""
        self._next_id += 1
        job = TransferJob(
            job_id=self._next_id,
            keys=tuple(keys),
            chunk_ids=np.array(slots, dtype=np.int32),
            is_promotion=is_promotion,
            req_context=context,
        )
        ended = self._waiting[job.job_id] = asyncio.get_running_loop().create_future()
        return job, ended

    def submit(self, submit: Callable[[TransferJob], None], job: TransferJob) -> None:
        """Hand a job to the tier. Raises what ``submit`` raises."""
        try:
            submit(job)
        except Exception:
            # It is unknown whether it has begun. If it may have, it is in flight.
            if self._drain():
                raise
        self._wanted.set()

    async def repeat(self, query: Callable[[], bool]) -> None:
        """Make a call now, and again after each of the tier's steps, until it returns True."""
        if query():
            return
        self._lookups += 1
        self._wanted.set()  # once: a step that resolves nothing is no reason for the next at once
        try:
            while True:
                await self._stepped.wait()
                if query():
                    return
        finally:
            self._lookups -= 1

    def forget(self) -> None:
        """Note that no job is in flight any more, however it ended."""
        self._waiting.clear()

    @contextmanager
    def request(self) -> Iterator[ReqContext]:
        """Announce a request for one call: kvtier's calls may be for many requests at once."""
        self._next_id += 1
        context = ReqContext(req_id=f"kvtier-{self._next_id}")
        self._tier.on_new_request(context)
        try:
            yield context
        finally:
            self._tier.on_request_finished(context)

    def _step(self) -> bool:
        """Run the calls that vLLM's manager makes to a tier in each of the engine's steps.

        False: it is unknown which jobs have ended.
        """
        # If it raises, results may be lost.
        goes_well = self.goes_well(self._collect) or self._drain()
        for serve in self._serve_peers:
            self.goes_well(serve)
        self.goes_well(lambda: self._tier.on_schedule_end(ScheduleEndContext((), ())))
        self.goes_well(self._pass_on_removals)
        self.goes_well(self._pass_on_stats)
        stepped, self._stepped = self._stepped, asyncio.Event()
        stepped.set()
        return goes_well

    def _pass_on_removals(self) -> None:
        """Report removed blocks. kvtier announces stores by itself, but does not see removals."""
        removed = [key for event in self._tier.take_events() if event.removed for key in event.keys]
        if removed:
            self._lost(removed)

    def _pass_on_stats(self) -> None:
        if self._stats is not None and self._stats.has_room:
            reported = self._tier.get_stats()
            if reported is not None and not reported.is_empty():
                self._stats.post(reported)

    def _drain(self) -> bool:
        """End all jobs: wait until nothing touches a slot. False: the tier can't confirm that."""
        if not (self.goes_well(self._tier.drain_jobs) and self.goes_well(self._collect)):
            return False
        for number, ended in self._waiting.items():
            if not ended.done():
                ended.set_result(JobResult(number, success=False))
        self._waiting.clear()
        return True

    def _collect(self) -> None:
        for result in self._tier.get_finished_jobs():
            ended = self._waiting.pop(result.job_id, None)
            if ended is None:
                self.unknown += 1
            elif not ended.done():
                ended.set_result(result)

    def _has_more_to_do(self) -> bool:
        has_more = False

        def ask() -> None:
            nonlocal has_more
            has_more = self._tier.has_pending_work()

        self.goes_well(ask)
        return has_more

    def goes_well(self, call: Callable[[], object]) -> bool:
        """Make a call that has no waiting caller. False: it raised, which is logged once a kind."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            kind = type(error).__name__
            if kind not in self._raised:
                self._raised.add(kind)
                log.warning("a tier of vLLM's raised", tier=self._name, error=f"{kind}: {error}")
            return False
        return True


def slots_in(view: memoryview, buffers: Iterator[memoryview]) -> list[int]:
    """Return the rows of ``view`` that the buffers are. Raises ``ValueError`` for any other."""
    rows, row_bytes = view.shape or (0, 0)
    first = _address(view)
    slots = []
    for buffer in buffers:
        slot, rest = divmod(_address(buffer) - first, row_bytes)
        if rest or not 0 <= slot < rows or buffer.nbytes != row_bytes:
            raise ValueError("a buffer is not a slot of the primary tier")
        slots.append(slot)
    return slots


def _address(buffer: memoryview) -> int:
    address: int = np.asarray(buffer).__array_interface__["data"][0]
    return address
