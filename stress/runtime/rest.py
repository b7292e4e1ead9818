"""Phase two: the faults have stopped, and everything must be as it was before them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from msgspec.structs import asdict

from stress.failure import Failure
from stress.resources import Resources, resources_now

if TYPE_CHECKING:
    from collections.abc import Callable

    from stress.record import Record
    from stress.runtime.session import Session

RECOVERY_S_MAX: Final = 60.0
"""So long after the last fault a tier may stay away."""

SERVED_BLOCKS_MIN: Final = 8
BUSY_FACTOR: Final = 4.0
"""A machine that others use too may take longer: waiting ends after so many times the limit,
and what counts is the time in which steps were short (``Checker.step_s``)."""


class Rest:
    """Goes through phase two. Raises ``Failure``."""

    def __init__(self, session: Session, record: Record, sample: Callable[[], None]) -> None:
        self._session = session
        self._sample = sample
        self._checks = record.checks

    def breakers_close(self) -> None:
        """Serve requests until all tiers are given work again."""

        def closed() -> bool:
            return all(tier.breaker == "CLOSED" for tier in self._session.statistics().tiers)

        def tell() -> str:
            return str({tier.name: tier.breaker for tier in self._session.statistics().tiers})

        took_s = self._step_until(closed, "breakers stay open", tell)
        self._checks["breakers"] = f"closed after {took_s:.1f} s"

    def hits_are_back(self) -> None:
        """Serve requests from one tier after the other."""
        load = self._session.load
        for number, name in enumerate(self._session.tiers):
            before = load.counts.served_by[number]
            load.tiers = 1 << number

            def served(number: int = number, before: int = before) -> bool:
                return load.counts.served_by[number] - before >= SERVED_BLOCKS_MIN

            took_s = self._step_until(served, f"{name} serves nothing", self._tiers_in_words)
            self._checks[f"hits from {name}"] = f"back after {took_s:.1f} s"
        load.tiers = -1

    def nothing_is_held(self) -> None:
        """Begin no more requests; see that every slot is free or ready, and nothing in flight."""
        load, facade = self._session.load, self._session.facade

        def is_quiet() -> bool:
            now = facade.statistics().primary
            held = now.pinned_slots or now.quarantined_slots or now.promotion_slots or now.requests
            whole = now.free_slots + now.ready_slots == now.slot_count
            return load.is_idle() and not facade.get_finished() and whole and not held

        took_s = self._step_until(is_quiet, "not at rest", self._primary_in_words, requests_max=0)
        self._checks["slots"] = f"all free or ready after {took_s:.1f} s"

    def resources_are_as(self, before: Resources) -> None:
        """Compare what the process holds with what it held before the faults."""
        left: dict[str, str] = {}

        def same() -> bool:
            nonlocal left
            left = resources_now().left_since(before)
            return not left

        self._step_until(same, "not as before the faults", lambda: str(left), requests_max=0)
        self._checks["resources"] = "descriptors, threads, processes and memory are as before"

    def _tiers_in_words(self) -> str:
        return str(
            {
                tier.name: (tier.breaker, asdict(tier.counts))
                for tier in self._session.statistics().tiers
            }
        )

    def _primary_in_words(self) -> str:
        now = self._session.statistics()
        flight = {
            tier.name: (
                tier.probes_in_flight,
                tier.promotion_jobs_in_flight,
                tier.cascade_jobs_in_flight,
            )
            for tier in now.tiers
        }
        return f"{now.primary}, probes, loads and stores in flight: {flight}"

    def _step_until(
        self,
        done: Callable[[], bool],
        what: str,
        tell: Callable[[], str],
        requests_max: int = 4,
    ) -> float:
        """Step until something holds; returns after how many seconds of short steps."""
        counted_s, began_s = 0.0, time.monotonic()
        while not done():
            is_late = time.monotonic() - began_s > BUSY_FACTOR * RECOVERY_S_MAX
            if counted_s > RECOVERY_S_MAX or is_late:
                raise Failure(f"{what} {counted_s:.0f} s after the last fault: {tell()}")
            self._session.load.step(requests_max)
            counted_s += self._session.checker.step_s
            self._sample()
        return counted_s
