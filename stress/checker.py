"""What must be true at every step of a run, whatever goes wrong.

Each byte that is read is exactly the key's; no lookup stays None past the deadlines; no counter
falls; no handler raises; and the events fold to what is resident.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kvtier.core.events import PRIMARY, EventKind
from stress.contents import content_of
from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.events import Event
    from kvtier.core.statistics import Statistics
    from kvtier.engine.facade import SchedulerFacade
    from kvtier.plugin_api.slot_memory import SlotMemory
    from stress.log_file import Noticed

STEP_S_MAX: Final = 0.25
"""So much of a step counts, however long it took: a machine that stood still is no fault."""

RESIDENT_EVERY_STEPS: Final = 50
"""All keys are compared so often; how many there are, in each step."""


class Checker:
    """Looks at all that a runtime serves. Raises ``Failure`` as soon as something is wrong."""

    def __init__(self, memory: SlotMemory, noticed: Noticed, pending_s_max: float) -> None:
        self.step_s = 0.0  #: how long the last step counts
        self.resident: dict[int, set[bytes]] = {PRIMARY: set()}  #: tier → its keys, by its events
        self._memory = memory
        self._noticed = noticed
        self._pending_s_max = pending_s_max
        self._counters: dict[str, int | float] = {}
        self._steps = 0
        self._stepped_at = time.monotonic()

    def check_read(
        self, who: str, keys: Sequence[bytes], slots: Sequence[int], weights: str
    ) -> None:
        """Compare what slots hold with what belongs to their keys."""
        for key, slot in zip(keys, slots, strict=True):
            found = bytes(self._memory.view(slot))
            if found != content_of(key, weights):
                raise Failure(
                    f"{who}: wrong bytes for {key.hex()} in slot {slot}: {found[:16].hex()}..."
                )

    def check_pending(self, who: str, waited_s: float) -> None:
        """See that lookups don't stay None."""
        if waited_s > self._pending_s_max:
            raise Failure(f"{who}: lookups stay None for {waited_s:.1f} s")

    def end_step(self, facade: SchedulerFacade) -> Statistics:
        """Check what one step has changed; after ``step_end``."""
        now = time.monotonic()
        self.step_s, self._stepped_at = min(now - self._stepped_at, STEP_S_MAX), now
        self._steps += 1
        self._fold(facade.take_events())
        statistics = facade.statistics()
        # The facade doesn't say which keys are READY without taking its lookups for uses.
        is_due = self._steps % RESIDENT_EVERY_STEPS == 0
        there = set(facade._primary.resident()) if is_due else None  # noqa: SLF001
        told = set(self.resident[PRIMARY])
        ready, told_of = statistics.primary.ready_slots, len(self.resident[PRIMARY])
        # Tiers in threads may report between any two calls: then it is not the same moment.
        if not self._fold(facade.take_events()):
            if told_of != ready:
                raise Failure(f"events tell of {told_of} resident blocks, there are {ready}")
            if there is not None and told != there:
                raise Failure(f"events tell of other blocks than those resident: {told ^ there}")
        self._check_counters(statistics)
        return statistics

    def _fold(self, events: Sequence[Event]) -> bool:
        """Take events in; returns whether one of them is the primary tier's."""
        for event in events:
            keys = self.resident.setdefault(event.tier, set())
            if event.kind is EventKind.STORED:
                keys.update(event.keys)
            elif event.kind is EventKind.REMOVED:
                keys.difference_update(event.keys)
            elif event.kind is EventKind.CLEARED:
                keys.clear()
        return any(event.tier == PRIMARY for event in events)

    def _check_counters(self, statistics: Statistics) -> None:
        """Compare all counters with what they were: one that falls ends a vLLM server."""
        now = statistics.counters()
        for name, before in self._counters.items():
            if now.get(name, -1) < before:
                raise Failure(f"the counter {name} fell from {before} to {now.get(name)}")
        self._counters = now
        if statistics.faults:
            raise Failure(f"{statistics.faults} handlers of the engine raised, see the log")
        # Without memory, which is one of the faults, any policy may raise: that is no wrong of it.
        if self._noticed.broken_threads:
            raise Failure(f"unhandled exception in kvtier thread: {self._noticed.broken_threads}")
        if self._noticed.broken_policies:
            raise Failure(f"an eviction policy raised: {self._noticed.broken_policies}")
