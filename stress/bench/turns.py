"""One request on one manager, call by call, as vLLM's scheduler makes them.

A *turn* is all calls of one request on one side: its lookups, its store or its
load, its end, and the two steps that this takes. The clock is read around each
call, or around all lookups of the request together: one reading a lookup would
cost a third of the lookup.
"""

from __future__ import annotations

import time
from collections import defaultdict
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Self

from typing_extensions import override
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

from kvtier.errors import InternalError
from stress.bench.sides import NOTHING_NEW, make_context, make_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stress.bench.sides import ManagerSide


class Call(StrEnum):
    """What is measured, in the order of the table, and the promised ratio to vLLM's time.

    Most are counted by the key, some by the call, or the step.
    """

    def __new__(cls, text: str, bound: float | None = None) -> Self:
        """Make a member."""
        member = str.__new__(cls, text)
        member._value_, member.bound = text, bound
        return member

    bound: float | None

    @property
    def is_of_keys(self) -> bool:
        """Whether it is counted by the key."""
        return self not in _BY_THE_CALL

    LOOKUP_HIT = "lookup, hit", 1 / 3
    LOOKUP_MISS = "lookup, miss", 1 / 3
    LOOKUP_FILLING = "lookup, pending (being filled)", 1 / 3
    LOOKUP_ASKED = "lookup, pending (tier is asked)"
    LOOKUP_PROBING = "lookup, pending (tier has been asked)", 1 / 3
    PREPARE_STORE = "prepare_store", 1 / 3
    PREPARE_STORE_EVICTING = "prepare_store, evicting", 1 / 3
    COMPLETE_STORE = "complete_store", 1 / 2
    PREPARE_LOAD = "prepare_load", 1 / 2
    COMPLETE_LOAD = "complete_load", 1 / 2
    FINISHED_STORED = "on_request_finished, stored", 1 / 2
    FINISHED_LOADED = "on_request_finished, loaded", 1 / 2
    TOUCH = "touch", 1.0
    LOAD_SOURCE = "get_load_source"
    WHOLE_STORED = "all calls of a request, stored"
    WHOLE_LOADED = "all calls of a request, loaded"
    NEW_REQUEST = "on_new_request"
    SCHEDULE_END = "on_schedule_end"
    GET_STATS = "get_stats"
    TAKE_EVENTS = "take_events"
    TAKE_EVENTS_OF_KEYS = "take_events, blocks stored or evicted"
    QUIET_STEP = "a step that only decodes"


_BY_THE_CALL: Final = frozenset(
    {Call.NEW_REQUEST, Call.SCHEDULE_END, Call.GET_STATS, Call.TAKE_EVENTS, Call.QUIET_STEP}
)
QUIET_STEPS: Final = 20
"""So many, one after the other, count as one figure: a single one is over too soon to be timed."""

TIER_TIMEOUT_S: Final = 30.0
TIER_POLL_S: Final = 0.001


class Stopwatch:
    """Takes the time of calls: for each, one figure a request, in nanoseconds a key (or a call)."""

    def __init__(self) -> None:
        self.ns: defaultdict[str, list[float]] = defaultdict(list)
        self._turn_ns = 0

    def call(self, name: str, function: Callable[..., Any], *arguments: Any, keys: int = 1) -> Any:  # noqa: ANN401
        """Call and take the time. ``keys``: how many it is about."""
        started = time.perf_counter_ns()
        result = function(*arguments)
        self._note(name, time.perf_counter_ns() - started, keys)
        return result

    def each(
        self, name: str, function: Callable[..., Any], keys: Sequence[bytes], context: object
    ) -> list[Any]:
        """Call once a key and take the time of all calls together."""
        started = time.perf_counter_ns()
        results = [function(key, context) for key in keys]
        self._note(name, time.perf_counter_ns() - started, len(keys))
        return results

    def end_turn(self, name: str, keys: int) -> None:
        """Note what all calls since the last turn have taken together."""
        self.ns[name].append(self._turn_ns / keys)
        self._turn_ns = 0

    def _note(self, name: str, spent_ns: int, keys: int) -> None:
        self._turn_ns += spent_ns
        self.ns[name].append(spent_ns / keys)


class PauseWatch(Stopwatch):
    """Finds the longest single call of each kind.

    In the thread's own time, in which a busy machine's other processes do not show.
    """

    def __init__(self) -> None:
        super().__init__()
        self.longest_ns: defaultdict[str, int] = defaultdict(int)

    @override
    def call(self, name: str, function: Callable[..., Any], *arguments: Any, keys: int = 1) -> Any:
        began_ns = time.thread_time_ns()
        result = function(*arguments)
        self.longest_ns[name] = max(self.longest_ns[name], time.thread_time_ns() - began_ns)
        return result

    @override
    def each(
        self, name: str, function: Callable[..., Any], keys: Sequence[bytes], context: object
    ) -> list[Any]:
        return [self.call(name, function, key, context) for key in keys]

    @override
    def end_turn(self, name: str, keys: int) -> None:
        """Nothing: a whole turn is no single call."""


class RequestPlayer:
    """Plays requests on one side. Block numbers stand for keys, see ``make_keys``."""

    def __init__(self, side: ManagerSide, watch: Stopwatch) -> None:
        self.side = side
        self.watch = watch
        self._manager = side.manager
        self._requests = 0

    def store(self, first: int, count: int, *, evicting: bool = False) -> None:
        """Play a request whose blocks are nowhere yet; they are stored."""
        watch, manager = self.watch, self._manager
        keys, context = self._request(first, count)
        watch.call(Call.NEW_REQUEST, manager.on_new_request, context)
        self._look_for_new(keys, context, first)
        self._end_step(context)
        output = watch.call(
            Call.PREPARE_STORE_EVICTING if evicting else Call.PREPARE_STORE,
            manager.prepare_store,
            list(keys),
            context,
            keys=count,
        )
        if output is None or len(output.keys_to_store) != count:
            raise InternalError(f"{self.side.name}: prepare_store did not take all of {count} keys")
        stored = set(output.keys_to_store)  # as vLLM's connector keeps them
        self._look_again(Call.LOOKUP_FILLING, LookupResult.HIT_PENDING, first, count)
        self._take(events_of=count if evicting else 0)

        watch.call(Call.COMPLETE_STORE, manager.complete_store, stored, context, keys=count)
        self._end_step()
        watch.call(Call.FINISHED_STORED, manager.on_request_finished, context, keys=count)
        self._take(events_of=count)
        watch.end_turn(Call.WHOLE_STORED, count)
        self._settle()

    def fill(self, first: int, count: int) -> None:
        """Store new blocks with no call more than that takes, and untimed."""
        manager = self._manager
        keys, context = self._request(first, count)
        manager.on_new_request(context)
        manager.prepare_store(keys, context)
        manager.complete_store(set(keys), context)
        manager.on_request_finished(context)
        self.side.step()
        manager.get_stats()
        list(manager.take_events())
        self._settle()

    def load(self, first: int, count: int, *, decodes: bool = False) -> None:
        """Play a request all of whose blocks are in the primary tier.

        ``decodes``: then with steps in which no request comes, ends, loads or stores.
        """
        watch, manager = self.watch, self._manager
        keys, context = self._request(first, count)
        watch.call(Call.NEW_REQUEST, manager.on_new_request, context)
        found = watch.each(Call.LOOKUP_HIT, manager.lookup, keys, context)
        self._expect(found, LookupResult.HIT)
        watch.each(Call.LOAD_SOURCE, manager.get_load_source, keys, context)
        watch.call(Call.TOUCH, manager.touch, keys, context, keys=count)
        watch.call(Call.PREPARE_LOAD, manager.prepare_load, list(keys), context, keys=count)
        self._end_step(context)
        self._take()

        watch.call(Call.COMPLETE_LOAD, manager.complete_load, set(keys), context, keys=count)
        self._end_step()
        if decodes:
            self._quiet_steps()
        watch.call(Call.FINISHED_LOADED, manager.on_request_finished, context, keys=count)
        self._take()
        watch.end_turn(Call.WHOLE_LOADED, count)

    def _quiet_steps(self) -> None:
        manager = self._manager
        started = time.perf_counter_ns()
        for _ in range(QUIET_STEPS):
            manager.on_schedule_end(NOTHING_NEW)
            manager.get_stats()
            list(manager.take_events())
        self.watch.ns[Call.QUIET_STEP].append((time.perf_counter_ns() - started) / QUIET_STEPS)

    def ask(self, first: int, count: int) -> None:
        """Play a request whose blocks are nowhere, and which goes when its tier has said so."""
        keys, context = self._request(first, count)
        self._manager.on_new_request(context)
        self._look_for_new(keys, context, first)
        self._manager.on_request_finished(context)
        self.side.step()

    def _request(self, first: int, count: int) -> tuple[list[bytes], Any]:
        """Return keys that are equal to earlier ones and not the same objects."""
        self._requests += 1
        keys = make_keys(first, count)
        return keys, make_context(f"request-{self._requests}", keys)

    def _look_for_new(self, keys: list[bytes], context: object, first: int) -> None:
        """Look up blocks that are nowhere; with a tier, wait until it has said so."""
        watch, manager = self.watch, self._manager
        if self.side.has_tier:
            asked = watch.each(Call.LOOKUP_ASKED, manager.lookup, keys, context)
            self._expect(asked, LookupResult.RETRY)
            self._look_again(Call.LOOKUP_PROBING, LookupResult.RETRY, first, len(keys))
            # Each of them: on a busy machine they are asked for in several probes.
            self._wait(
                lambda: LookupResult.RETRY not in [manager.lookup(key, context) for key in keys]
            )
        found = watch.each(Call.LOOKUP_MISS, manager.lookup, keys, context)
        self._expect(found, LookupResult.MISS)

    def _look_again(self, name: str, expected: LookupResult, first: int, count: int) -> None:
        """Look the same blocks up for a second request, which then gives up."""
        keys, context = self._request(first, count)
        self._manager.on_new_request(context)
        found = self.watch.each(name, self._manager.lookup, keys, context)
        self._expect(found, expected)
        self._manager.on_request_finished(context)

    def _expect(self, found: list[Any], expected: LookupResult) -> None:
        if any(result is not expected for result in found):
            names = sorted({result.name for result in found})
            raise InternalError(
                f"{self.side.name}: lookups said {', '.join(names)} instead of {expected.name}"
            )

    def _end_step(self, new: Any = None) -> None:  # noqa: ANN401 - vLLM's ReqContext
        context = NOTHING_NEW if new is None else ScheduleEndContext((new.req_id,), ())
        self.watch.call(Call.SCHEDULE_END, self._manager.on_schedule_end, context)

    def _take(self, *, events_of: int = 0) -> None:
        """Take statistics and events. ``events_of``: so many blocks; 0: there are none."""
        self.watch.call(Call.GET_STATS, self._manager.get_stats)
        name = Call.TAKE_EVENTS_OF_KEYS if events_of else Call.TAKE_EVENTS
        self.watch.call(name, lambda: list(self._manager.take_events()), keys=events_of or 1)

    def _settle(self) -> None:
        """Step until the tier has stored everything, so that it does not disturb the next turn."""
        if self.side.has_tier:
            self._wait(lambda: not self._manager.has_pending_work())

    def _wait(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIER_TIMEOUT_S
        while not reached():
            if time.monotonic() > deadline:
                raise InternalError(f"{self.side.name}: the tier took over {TIER_TIMEOUT_S} s")
            time.sleep(TIER_POLL_S)
            self.side.step()
