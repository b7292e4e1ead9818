"""Plays a trace through a real runtime, as an engine's scheduler would drive it.

In each step the GPU's work since the last one is reported, arrivals enter, requests that wait for
tiers look their prefix up again, computed prompts are stored, and the step ends. Then the GPU
copies the blocks that the step decided on. Between steps the clock
(``kvtier/tools/replay/clock.py``) passes the time.

A request arrives; enters when there is room among the requests in flight; looks up its blocks until
no result is None; loads its hits; gets slots for the rest of its prompt, which is computed in
stated time; gets its first token; has the computed blocks copied to the slots; and ends when its
output has been computed, which is reported after the stores of the next step. This is the order of
vLLM's calls: eviction policies depend on it.

For a record, the hits of the GPU's prefix cache, failures of tiers, and resets are repeated,
because the replay's own caches cannot reproduce them. Other hits are never taken from a record.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from kvtier.core.events import PRIMARY, EventKind
from kvtier.core.messages import RequestOrder
from kvtier.core.metrics import PRIMARY_TIER
from kvtier.tools.replay.content import key_of
from kvtier.tools.replay.measurements import Misread, ReplayMeasured

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.core.events import Event
    from kvtier.core.messages import StoreGrant
    from kvtier.core.statistics import Statistics
    from kvtier.engine.facade import SchedulerFacade
    from kvtier.plugin_api.keys import Key
    from kvtier.tools.replay.clock import ReplayClock
    from kvtier.tools.replay.engine_model import EngineModel
    from kvtier.tools.replay.gpu import StandInGpu
    from kvtier.tools.replay.traces import Trace, TraceRequest

INTERVALS: Final = 120
"""Intervals that the trace's time is cut into, for figures over time."""

OBSERVE_STEPS: Final = 256
"""Steps after which the runtime's observations are polled: it keeps a limited number."""

T = TypeVar("T")


class _Request:
    """One request in flight."""

    __slots__ = (
        "_order",
        "computed_at",
        "from_trace",
        "gpu_blocks",
        "grant",
        "hits",
        "keys",
        "name",
        "scheduler_s",
        "sources",
        "waits_since",
    )

    def __init__(self, name: str, from_trace: TraceRequest, now: float, block_tokens: int) -> None:
        self.name = name
        self.from_trace = from_trace
        self.gpu_blocks = from_trace.gpu_tokens // block_tokens
        self.keys = [key_of(block) for block in from_trace.blocks]
        self._order: RequestOrder | None = RequestOrder(0, tuple(self.keys))
        self.waits_since = now
        self.computed_at = 0.0  # when its prompt is
        self.grant: StoreGrant
        self.hits = 0
        self.sources: list[int] = []  # of each hit: the tier that it was promoted from, or PRIMARY
        self.scheduler_s = 0.0

    def pop_order(self) -> RequestOrder | None:
        """Return the order of all keys, once."""
        order, self._order = self._order, None
        return order

    @property
    def found(self) -> list[Key]:
        """The blocks to load: behind those of the engine's own prefix cache."""
        return self.keys[self.gpu_blocks : self.gpu_blocks + self.hits]

    @property
    def offered(self) -> list[Key]:
        """The blocks to offer for storing. If none is loaded, vLLM offers the GPU's too."""
        return self.keys[self.gpu_blocks + self.hits :] if self.hits else self.keys


class _Copy(NamedTuple):
    """The GPU's copies for one request between two steps."""

    request: _Request
    keys: Sequence[Key]
    slots: Sequence[int]
    is_load: bool
    epoch: int


class _Due(NamedTuple):
    """An event of a request at a given time."""

    at: float
    number: int  #: breaks ties
    happen: Callable[[_Request, float], None]
    request: _Request


class Player:
    """One run of one trace."""

    def __init__(
        self,
        trace: Trace,
        facade: SchedulerFacade,
        gpu: StandInGpu,
        model: EngineModel,
        clock: ReplayClock,
        tier_names: Sequence[str],
    ) -> None:
        """``facade`` must run on ``clock.now``, and collect the events of all tiers."""
        self._block_tokens = trace.block_tokens
        self._facade = facade
        self._gpu = gpu
        self._model = model
        self._clock = clock
        last_s = model.arrival_s(trace.requests[-1]) if trace.requests else 0.0
        interval_s = max(last_s, 1.0) / INTERVALS
        self.measured = ReplayMeasured((PRIMARY_TIER, *tier_names), interval_s, facade.statistics())
        self._to_come = deque(trace.requests)
        self._tier_names = tier_names
        self._events = deque(trace.recorded.events if trace.recorded else ())
        self._entered = 0
        self._in_flight = 0
        self._recorded_ends: dict[str, float] = {}  # of those in flight
        self._looking: list[_Request] = []
        self._looked_in_vain = False  # since the tiers became idle
        self._storing: list[_Request] = []  # computed, but without slots yet
        self._due: list[_Due] = []
        self._due_number = count()
        self._scheduled: list[str] = []  # in this step
        self._ended: list[_Request] = []  # in this step
        self._ended_before: list[_Request] = []  # in the step before
        self._computed_until = 0.0
        self._copies: list[_Copy] = []
        self._cascading: list[dict[Key, float]] = [{} for _ in tier_names]
        self._resident: list[set[Key]] = [set() for _ in tier_names]
        self._looked_at_s = clock.real_s()

    def run(self, should_stop: Callable[[], bool], on_progress: Callable[[int], None]) -> bool:
        """Play; True if the trace was played to its end, False if it was stopped.

        ``on_progress`` is called with the number of further requests that have had their first
        token.
        """
        while self._is_unfinished() and not should_stop():
            before = self.measured.requests
            self._step()
            if self.measured.requests > before:
                on_progress(self.measured.requests - before)
        played = not self._is_unfinished()
        while played and self._facade.has_pending_work() and not should_stop():
            self._end_step()
            self._clock.pass_time(None, tiers_work=True)
        self._end_step()  # the last result may have arrived during the check for work
        self._observe()
        return played

    def _is_unfinished(self) -> bool:
        return bool(
            self._to_come or self._in_flight or self._copies or self._ended or self._ended_before
        )

    # --- one step ---

    def _step(self) -> None:
        self._report_copies()
        self._repeat_events()
        self._enter()
        looking, self._looking = self._looking, []
        for request in looking:
            self._look_up(request)
        now = self._clock.now()
        while self._due and self._due[0].at <= now:
            due = heapq.heappop(self._due)
            due.happen(due.request, due.at)
        storing, self._storing = self._storing, []
        for request in storing:
            self._store(request)
        self._report_ended()
        self._end_step()
        if self._copies:
            self._copy()
        else:
            self._pass_time()

    def _pass_time(self) -> None:
        """Let time pass until something can happen."""
        tiers_work = self._facade.has_pending_work()
        if self._looking and not tiers_work and not self._looked_in_vain:
            self._looked_in_vain = True
            return  # the answers are there
        self._looked_in_vain = False  # or the GPU computes the missing blocks
        until = self._due[0].at if self._due else None
        if self._may_enter():
            arrival = self._model.arrival_s(self._to_come[0])
            until = arrival if until is None else min(until, arrival)
        if self._events and until is not None:
            until = min(until, self._model.event_s(self._events[0]))
        self._clock.pass_time(until, tiers_work=tiers_work)

    def _repeat_events(self) -> None:
        """Repeat the recorded engine's events on the runtime."""
        now = self._clock.now()
        while self._events and self._model.event_s(self._events[0]) <= now:
            event = self._events.popleft()
            if event.kind == "reset":
                self._facade.reset()
                self._facade.on_reset_flushed()
            elif event.tier in self._tier_names:
                tier = self._tier_names.index(event.tier)
                is_down, stores = event.kind == "tier_down", event.work == "stores"
                self._facade.bypass(tier, stores=stores, is_bypassed=is_down)

    # --- the life of a request ---

    def _enter(self) -> None:
        now = self._clock.now()
        while self._may_enter():
            arrival = self._model.arrival_s(self._to_come[0])
            if arrival > now:
                break
            self._entered += 1
            from_trace = self._to_come.popleft()
            request = _Request(f"r{self._entered}", from_trace, now, self._block_tokens)
            self.measured.entering.add(now - arrival)
            self._in_flight += 1
            if from_trace.ended_s is not None:
                self._recorded_ends[request.name] = from_trace.ended_s
            self._looking.append(request)
            self._call(request, "start request", 1, self._facade.on_request_started, request.name)

    def _may_enter(self) -> bool:
        """Return whether another request can enter: one has arrived, and there is room for it.

        A recorded one waits for those that had ended when it arrived: its client may have done so.
        """
        if not self._to_come or self._in_flight >= self._model.requests_in_flight_max:
            return False
        arrived_s = self._to_come[0].time_s
        return all(ended_s > arrived_s for ended_s in self._recorded_ends.values())

    def _look_up(self, request: _Request) -> None:
        started = time.perf_counter()
        keys = request.keys[request.gpu_blocks :] if request.gpu_blocks else request.keys
        hits = self._facade.lookup_prefix(keys, request.name)
        seconds = time.perf_counter() - started
        request.scheduler_s += seconds
        self.measured.scheduler_s += seconds  # the facade itself samples the time per key
        if hits is None:
            self._looking.append(request)
            return
        self.measured.waiting.add(self._clock.now() - request.waits_since)
        request.hits = hits
        if not hits:
            self._compute(request)
            return
        facade = self._facade
        keys = request.found
        request.sources = self._call(request, "load_source", hits, self._sources_of, request)
        prepare = partial(facade.prepare_load, order=request.pop_order())
        slots = self._call(request, "prepare_load", hits, prepare, keys, request.name)
        self._copies.append(_Copy(request, keys, slots, is_load=True, epoch=facade.epoch))

    def _sources_of(self, request: _Request) -> list[int]:
        """Return the source of each hit, as vLLM does for its metrics."""
        sources = self._facade.load_sources(request.name)
        return [sources.get(key, PRIMARY) for key in request.found]

    def _compute(self, request: _Request) -> None:
        """Let the GPU compute the missing part of the prompt, in its turn."""
        start = max(self._clock.now(), self._computed_until)
        self._computed_until = start + self._model.prefill_s(self._missing_tokens(request))
        request.computed_at = self._computed_until
        self._happens(start, self._begin, request)
        self._happens(request.computed_at, self._first_token, request)

    def _begin(self, request: _Request, _: float) -> None:
        """Begin to compute. As in vLLM, computed blocks get their slots in the same step."""
        self._scheduled.append(request.name)
        if request.offered:
            self._store(request)

    def _missing_tokens(self, request: _Request) -> int:
        """Return the number of prompt tokens to compute: one even if all were hit."""
        found = request.gpu_blocks + request.hits
        had = max(request.from_trace.gpu_tokens, found * self._block_tokens)
        return max(1, request.from_trace.input_tokens - had)

    def _first_token(self, request: _Request, at: float) -> None:
        self._count(request, at)
        self._happens(self._model.end_s(request.from_trace, at), self._finish, request)

    def _store(self, request: _Request) -> None:
        keys = request.offered
        prepare = partial(self._facade.prepare_store, order=request.pop_order())
        grant = self._call(request, "prepare_store", len(keys), prepare, keys, request.name)
        if grant is None:
            self.measured.stores_refused += 1
            self._storing.append(request)
        elif grant.keys:
            request.grant = grant
            self._happens(request.computed_at, self._copy_out, request)

    def _copy_out(self, request: _Request, _: float) -> None:
        """Let the GPU copy the computed blocks to the granted slots."""
        keys, slots, epoch = request.grant.keys, request.grant.slots, request.grant.epoch
        self._copies.append(_Copy(request, keys, slots, is_load=False, epoch=epoch))

    def _finish(self, request: _Request, _: float) -> None:
        self._ended.append(request)
        self._in_flight -= 1
        self._recorded_ends.pop(request.name, None)

    def _report_ended(self) -> None:
        """Report the requests that ended before this step: after its stores, as in vLLM."""
        reported, self._ended_before, self._ended = self._ended_before, self._ended, []
        finish = self._facade.on_request_finished
        for request in reported:
            if request in self._storing:
                self._storing.remove(request)
            self._call(request, "finish request", 1, finish, request.name, request.keys)
            self.measured.scheduler.add(request.scheduler_s)

    def _happens(
        self, at: float, happen: Callable[[_Request, float], None], request: _Request
    ) -> None:
        heapq.heappush(self._due, _Due(at, next(self._due_number), happen, request))

    def _count(self, request: _Request, at: float) -> None:
        """Count the request at its first token."""
        measured = self.measured
        seconds = at - self._model.arrival_s(request.from_trace)
        interval = measured.interval_at(at)
        measured.requests += 1
        measured.input_tokens += request.from_trace.input_tokens
        measured.computed_tokens += self._missing_tokens(request)
        measured.first_token.add(seconds)
        interval.requests += 1
        interval.first_token.add(seconds)
        measured.referenced_blocks += len(request.keys)
        interval.referenced_blocks += len(request.keys)
        known = request.from_trace.gpu_tokens
        measured.gpu_tokens += known
        measured.gpu_blocks += request.gpu_blocks
        for number, tier in enumerate(request.sources, start=request.gpu_blocks + 1):
            source = 0 if tier == PRIMARY else tier + 1
            end = min(number * self._block_tokens, request.from_trace.input_tokens)
            measured.note_hit(interval, source, end - known)
            known = end

    # --- the GPU ---

    def _copy(self) -> None:
        """Do the GPU's work between two steps: write and read slots."""
        started = time.perf_counter()
        for copy in self._copies:
            if not copy.is_load:
                self._gpu.store(copy.keys, copy.slots)
                continue
            for wrong in self._gpu.load(copy.keys, copy.slots):
                tier = copy.request.sources[copy.keys.index(wrong.key)]
                source = self.measured.sources[0 if tier == PRIMARY else tier + 1]
                self.measured.note_misread(Misread(copy.request.name, source, wrong))
        self.measured.gpu_s += time.perf_counter() - started

    def _report_copies(self) -> None:
        """Report the copies to the runtime."""
        copies, self._copies = self._copies, []
        facade = self._facade
        for request, keys, _, is_load, epoch in copies:
            if is_load:
                complete: Callable[..., None] = partial(facade.complete_load, epoch=epoch)
                self._call(request, "complete_load", len(keys), complete, keys, request.name)
                self._compute(request)
                continue
            now = self._clock.now()
            for cascading in self._cascading:
                cascading.update(dict.fromkeys(keys, now))
            complete = partial(facade.complete_store, epoch=epoch)
            self._call(request, "complete_store", len(keys), complete, keys, request.name)

    # --- the runtime ---

    def _call(
        self,
        request: _Request,
        name: str,
        keys: int,
        function: Callable[..., T],
        *arguments: Any,  # noqa: ANN401 - what the facade's method takes
    ) -> T:
        """Call the facade, and note the duration."""
        started = time.perf_counter()
        answer = function(*arguments)
        seconds = time.perf_counter() - started
        request.scheduler_s += seconds
        self.measured.note_operation(name, seconds, keys)
        return answer

    def _end_step(self) -> None:
        measured = self.measured
        started = time.perf_counter()
        if self._scheduled:
            self._facade.on_requests_scheduled(self._scheduled)
            self._scheduled = []
        self._facade.step_end()
        events = self._facade.take_events()
        measured.note_operation("end step", time.perf_counter() - started, 1)
        measured.steps += 1
        self._follow(events)
        if measured.steps % OBSERVE_STEPS == 0:
            self._observe()
        self._look_at(self._facade.statistics())

    def _follow(self, events: Sequence[Event]) -> None:
        """Track the contents of the secondary tiers."""
        now = self._clock.now()
        for kind, keys, tier in events:
            if tier == PRIMARY:
                continue
            resident = self._resident[tier]
            if kind is EventKind.STORED:
                resident.update(keys)
                cascading = self._cascading[tier]
                for key in keys:
                    since = cascading.pop(key, None)
                    if since is not None:
                        self.measured.tiers[tier].cascade.add(now - since)
            elif kind is EventKind.REMOVED:
                resident.difference_update(keys)
                self.measured.tiers[tier].evicted_blocks += len(keys)
            elif kind is EventKind.CLEARED:
                resident.clear()

    def _look_at(self, statistics: Statistics) -> None:
        """Note the fill level and the work of the tiers."""
        real_s = self._clock.real_s()
        passed_s = real_s - self._looked_at_s
        tiers_before = self.measured.statistics.tiers
        for tier, before in zip(self.measured.tiers, tiers_before, strict=True):
            if before.promotion_jobs_in_flight:
                tier.loading_s += passed_s
            if before.cascade_jobs_in_flight:
                tier.storing_s += passed_s
        self._looked_at_s = real_s
        resident = [statistics.primary.ready_slots, *map(len, self._resident)]
        self.measured.note_statistics(self._clock.now(), statistics, resident)

    def _observe(self) -> None:
        """Take the runtime's own observations."""
        observed = self._facade.drain_observations()
        self.measured.lookup.seconds.extend(observed.lookup_seconds)
        for measured, tier in zip(self.measured.tiers, observed.tiers, strict=True):
            measured.probe.seconds.extend(tier.probe_seconds)
            measured.promotion.seconds.extend(job.seconds for job in tier.jobs if job.is_load)
