"""Offers one tier to another program's tiering: synchronous calls that never wait for the tier.

The other program (vLLM's tiering) has slots of its own, gives them to a job, and takes them
back when the job has finished. It waits for that without a deadline, and has no quarantine.
So storage never touches its slots. Between them and the tier is an ordinary runtime, whose primary
tier is the staging memory, and one of kvtier's threads copies::

    load:   tier → promotion → READY → copy → the program's slot → finished
    store:  the program's slot → copy → READY → cascade → finished

A copy within memory ends soon, whatever the storage does. So a job can be finished at any moment
when no copy of it runs: its tier may then still read or write staging slots only, which are not
reused until the tier releases them.

- A job has a deadline, counted from its submission. Blocks that have not arrived by then fail.
- A job may be longer than the staging memory: a block leaves it once it has been copied, or
  stored, and the next one takes its slot. Nothing is cached there.
- The tier writes a store's bytes as they were when copied, whenever it writes them.
- Stores take no more slots than a tier's cascades may pin, so that loads find free ones.
- A request whose end is reported while it loads ends with its last load.

All methods belong to one thread at a time. If the runtime's primary tier breaks, lookups find no
block any more, and every job finishes as failed.

# Invariant: the program's slots are touched by copies of running jobs only.
#            Checked: _end_copies, a_slot_of_the_program_is_touched_by_a_copy_of_a_running_job_only.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from kvtier.core.block_state import BlockState
from kvtier.core.events import PRIMARY
from kvtier.engine.staged.staged_job import StagedJob
from kvtier.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.core.events import Event
    from kvtier.core.statistics import JobObservation, Statistics
    from kvtier.engine.facade import SchedulerFacade
    from kvtier.engine.staged.staged_job import Finished
    from kvtier.plugin_api.keys import Key, RequestId
    from kvtier.settings.runtime_config import RuntimeConfig

TIER: Final = 0
"""The number of the one tier."""

DRAIN_POLL_S: Final = 0.001

_COMING: Final = (BlockState.PROBING, BlockState.FILLING)

COPY_WAIT_BYTES_MAX: Final = 4 << 20
"""Copies of up to this size, half a millisecond, are waited for: else they cost a whole step."""


class Copier(Protocol):
    """Copies blocks between the program's slots and staging slots, one copy after the other."""

    def start(
        self, copy: int, slots: Sequence[int], staging: Sequence[int], *, to_staging: bool
    ) -> None:
        """Begin a copy with this number. ``slots``: the program's."""

    def pop_ended(self) -> list[tuple[int, bool]]:
        """Return the copies that have ended, and whether they succeeded."""

    def backlog_bytes(self) -> int:
        """Return the number of bytes still to copy."""

    def wait_idle(self) -> None:
        """Wait until every copy has ended. That depends on memory only, not on storage."""

    def stop(self) -> None:
        """End every copy, and release the program's slots."""


class _Request:
    """A running request of the program."""

    __slots__ = ("generation", "has_ended", "missed", "order")

    def __init__(self, generation: int) -> None:
        self.generation = generation  # of the weights that computed its blocks
        self.missed: set[Key] = set()  # blocks that no load delivered to it
        self.has_ended = False  # in the program, while its loads still run
        self.order: Iterable[Key] | None = None


class StagedFacade:
    """One tier behind another program's primary tier. Built by ``kvtier.runtime``."""

    def __init__(
        self,
        runtime: SchedulerFacade,
        config: RuntimeConfig,
        copier: Copier,
        *,
        waiting_stores_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``runtime``: of one tier; its primary tier's slots are the staging slots.

        ``waiting_stores_max``: limit on blocks that wait for a staging slot, pinned by the program.
        """
        self._runtime = runtime
        self._config = config
        self._copier = copier
        self._waiting_stores_max = waiting_stores_max
        self._clock = clock
        self._generation = 0
        self._requests: dict[RequestId, _Request] = {}
        self._jobs: dict[int, StagedJob] = {}
        self._copies: dict[int, tuple[StagedJob, Sequence[Key]]] = {}  # under way
        self._next_copy = 0
        self._has_new = False  # jobs were submitted since a step ended
        self._finished: list[Finished] = []
        self._is_closed = False

    # --- requests and lookups ---

    def on_request_started(self, request: RequestId) -> None:
        """Begin a request: lookups find no block for an unknown one."""
        self._requests[request] = _Request(self._generation)
        self._runtime.on_request_started(request)

    def on_request_finished(self, request: RequestId, order: Iterable[Key] | None = None) -> None:
        """End a request. Its jobs may still run. ``order``: all its keys from head to tail."""
        state = self._requests.get(request)
        if state is not None and self._is_loading(request):
            state.has_ended, state.order = True, order
        else:
            self._requests.pop(request, None)
            self._runtime.on_request_finished(request, order)

    def _is_loading(self, request: RequestId) -> bool:
        return any(job.is_load and job.request == request for job in self._jobs.values())

    def lookup(self, key: Key, request: RequestId) -> BlockState:
        """Return READY (it can be loaded), ABSENT, or PROBING: look up again in the next step.

        PROBING ends by the tier's deadline.
        """
        state = self._requests.get(request)
        if state is None or key in state.missed:
            return BlockState.ABSENT
        state.generation = self._generation  # it waits, so it has no block on the GPU
        found = self._runtime.survey(key, request)
        return BlockState.READY if found is BlockState.FILLING else found

    def touch(self, keys: Iterable[Key], request: RequestId) -> None:
        """Note that blocks were used, from head to tail."""
        self._runtime.touch(tuple(keys), request)

    # --- jobs ---

    def submit_load(
        self, job: int, request: RequestId, keys: Iterable[Key], slots: Iterable[int]
    ) -> None:
        """Begin to fill the program's slots, which it gets back when the job has finished."""
        if request not in self._requests:  # it has ended since it looked up
            self.on_request_started(request)
            self._requests[request].has_ended = True
        deadline = self._clock() + self._config.wait_timeout_s
        slot_of = dict(zip(keys, slots, strict=True))
        self._begin(StagedJob(job, request, slot_of, is_load=True, deadline=deadline))

    def submit_store(
        self, job: int, request: RequestId, keys: Iterable[Key], slots: Iterable[int]
    ) -> None:
        """Begin to store the program's slots, whose bytes must stay until the job has finished."""
        tier = self._config.tiers[TIER]
        slot_of = dict(zip(keys, slots, strict=True))
        deadline = self._clock() + tier.store_timeout_s
        begun = StagedJob(job, request, slot_of, is_load=False, deadline=deadline)
        state = self._requests.get(request)
        is_from_before = state is not None and state.generation < self._generation
        if tier.read_only or is_from_before:
            begun.end(slot_of, success=True)
        stored = self._runtime.are_stored(begun.left, TIER) or {}
        begun.end([key for key, is_there in stored.items() if is_there], success=True)
        waiting = sum(len(each.left) for each in self._jobs.values() if not each.is_load)
        room = max(0, self._waiting_stores_max - waiting)
        begun.end(list(islice(begun.left, room, None)), success=False)
        self._begin(begun)

    def _begin(self, job: StagedJob) -> None:
        assert job.number not in self._jobs, "a job has the number of one under way"
        self._jobs[job.number] = job
        self._has_new = True  # its work begins when the step ends, with that of others

    def drain_finished(self) -> list[Finished]:
        """Return the jobs that have finished since the last call. Never waits for storage."""
        self._poll()
        if 0 < self._copier.backlog_bytes() <= COPY_WAIT_BYTES_MAX:
            self._copier.wait_idle()
            self._go_on()
        finished, self._finished = self._finished, []
        return finished

    def drain(self) -> None:
        """Finish every job, waiting for the tier for ``close_timeout_s`` at most.

        When it returns, none of the program's slots is touched any more. Jobs that had not ended
        by then have failed; the tier keeps their staging slots until it releases them.
        """
        deadline = time.monotonic() + self._config.close_timeout_s
        self._poll()
        while self._jobs and time.monotonic() < deadline:
            time.sleep(DRAIN_POLL_S)
            self._poll()
        for job in self._jobs.values():
            job.give_up()
        self._copier.wait_idle()
        self._poll()
        assert not self._jobs, "a job that was given up has not finished"

    # --- the work of jobs ---

    def _poll(self) -> None:
        """Handle what the tier and the copier have done, and begin what follows."""
        if not self._jobs:
            self._runtime.get_finished()
            return
        self._runtime.step_end()  # deadlines pass, and what was begun before is sent
        self._go_on()

    def _go_on(self) -> None:
        """End copies and jobs, and begin as much as there is room for, job by job."""
        self._end_copies()
        now, load_room = self._clock(), self._config.slot_count
        store_room = 0 if all(job.is_load for job in self._jobs.values()) else self._store_room()
        for job in list(self._jobs.values()):
            if now >= job.deadline:
                job.give_up()
            elif job.is_load:
                load_room = self._load(job, load_room)
            else:
                store_room -= self._store(job, store_room)
            if job.has_ended:
                self._finish(job)

    def _load(self, job: StagedJob, room: int) -> int:
        """Begin to load ``room`` blocks at most, and copy READY ones; return the room left."""
        keys = list(islice(job.left, room)) if room else list(job.begun)
        states = self._runtime.promote(keys, job.request) if keys else []
        if states is None:
            job.give_up()
            return room
        both = list(zip(keys, states, strict=True))
        ready = [key for key, state in both if state is BlockState.READY]
        absent = [key for key, state in both if state is BlockState.ABSENT]
        job.end(absent, success=False)
        begun = [key for key, state in both if state in _COMING]
        job.begin_loads(begun)
        if ready:
            try:
                self._copy(job, ready, self._runtime.prepare_load(ready, job.request))
            except Misuse:  # the primary tier broke just now
                job.give_up()
        elif None in states and not begun:
            first = keys[states.index(None)]
            self._runtime.lookup_state(first, job.request)  # makes room: evicts late arrivals
        return 0 if None in states else max(0, room - len(states))

    def _store_room(self) -> int:
        """Return how many more slots stores may hold: the tier's link would defer more blocks."""
        copied = sum(len(keys) for job, keys in self._copies.values() if not job.is_load)
        (tier,) = self._runtime.statistics().tiers
        return self._config.cascade_slots_max - tier.cascade_slots - copied

    def _store(self, job: StagedJob, room: int) -> int:
        """Note what the tier has stored, and stage up to ``room`` blocks; return how many."""
        new = list(islice(job.left, max(0, room)))
        if not (new or job.at_tier):
            return 0
        stored = self._runtime.are_stored([*job.at_tier, *new], TIER)
        if stored is None:
            job.give_up()
            return 0
        ended = [key for key in job.at_tier if stored[key] is not None]
        done = [key for key in ended if stored[key]]
        job.end(done, success=True, moved=True)
        job.end([key for key in ended if not stored[key]], success=False)
        job.end([key for key in new if stored[key]], success=True)
        wanted = [key for key in new if not stored[key]]
        self._runtime.discard([*ended, *wanted])  # copies that loads left in staging are in the way
        if not wanted:
            return 0
        cuts = range(1, len(wanted) + 1)  # each is of use alone: the program may have the others
        grant = self._runtime.prepare_store(wanted, job.request, cuts=cuts)
        if grant is None or not grant.keys:
            return 0
        self._copy(job, grant.keys, grant.slots)
        return len(grant.keys)

    def _copy(self, job: StagedJob, keys: Sequence[Key], staging: Sequence[int]) -> None:
        job.begin_copy(keys)
        self._next_copy += 1
        self._copies[self._next_copy] = job, keys
        slots = [job.slot_of[key] for key in keys]
        self._copier.start(self._next_copy, slots, staging, to_staging=not job.is_load)

    def _end_copies(self) -> None:
        for copy, success in self._copier.pop_ended():
            job, keys = self._copies.pop(copy)
            assert job.number in self._jobs, "a job has finished while it was copied"
            job.end_copy(keys)
            if job.is_load:
                self._runtime.complete_load(keys, job.request)
                self._runtime.discard(keys)
                job.end(keys, success=success, moved=success)
                continue
            self._runtime.complete_store(keys, job.request, success=success)
            job.give_to_tier(keys)

    def _finish(self, job: StagedJob) -> None:
        del self._jobs[job.number]
        self._finished.append(job.outcome())
        state = self._requests.get(job.request)
        if not job.is_load or state is None:
            return
        state.missed.update(job.failed)
        if job.failed:  # ends the leases of its blocks; other loads promote theirs again
            self._runtime.on_requests_scheduled((job.request,))
        if state.has_ended and not self._is_loading(job.request):
            self.on_request_finished(job.request, state.order)

    # --- steps ---

    def step_end(self) -> None:
        """End a step: begin the work of its jobs, send its probes, and let deadlines pass."""
        if self._has_new:
            self._has_new = False
            self._go_on()
        self._runtime.step_end()

    def has_pending_work(self) -> bool:
        """Return whether more steps are useful: a job or a probe may still end in time."""
        self._poll()
        if self._jobs or self._finished:
            return True
        return self.statistics().tiers[TIER].probes_in_flight > 0

    def take_events(self) -> list[Event]:
        """Return the tier's gains and losses since the last call, in order."""
        return [event for event in self._runtime.take_events() if event.tier != PRIMARY]

    @property
    def evicts(self) -> bool:
        """Whether the tier is bounded, and so reports the blocks that it evicts."""
        return self._runtime.evicts(TIER)

    def statistics(self) -> Statistics:
        """Return a frozen snapshot."""
        return self._runtime.statistics()

    def drain_jobs(self) -> Sequence[JobObservation]:
        """Return the tier's jobs that have ended since the last call."""
        return self._runtime.drain_observations().tiers[0].jobs

    # --- the life of the tier ---

    def reset(self, *, weights_version: str | None = None, weights_changed: bool = False) -> None:
        """Begin a new generation, unless ``on_reset`` is ``keep``. ``drain`` first.

        This engine finds none of the blocks stored before again. The arguments are those of
        ``SchedulerFacade.reset``.
        """
        self._runtime.reset(weights_version=weights_version, weights_changed=weights_changed)
        if weights_version or weights_changed or not self._config.keeps_on_reset:
            self._generation += 1
            for state in self._requests.values():
                state.missed.clear()

    def close(self) -> bool:
        """End the tier, waiting at most ``close_timeout_s``. Safe to call twice.

        The program's slots are released in any case. False: the tier hangs, and may touch
        the staging slots until the process ends.
        """
        if not self._is_closed:
            self._is_closed = True
            self._copier.stop()
        return self._runtime.close()
