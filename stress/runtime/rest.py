"""Phase two: the faults have stopped, and everything must be as it was before them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec.structs import asdict

from kvtier.core.events import PRIMARY
from kvtier_backends.fs.temporary import MARKERS_NAME, parse_temporary_untrusted
from kvtier_backends.fs.unfinished import folders_untrusted
from stress.failure import Failure
from stress.resources import Resources, resources_now
from stress.runtime.processes import tier_processes
from stress.runtime.residency import DAMAGED_MAX, FS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from stress.limits import Limits
    from stress.record import Record
    from stress.runtime.residency import Residency
    from stress.runtime.session import Session

SERVED_BLOCKS_MIN: Final = 8
SOME_REQUESTS: Final = 20_000
"""As many as a whole gate serves: each kind of work has come by then, if it can."""
LOOK_S: Final = 0.25
"""To look through all folders takes a while."""


class Swept:
    """An ``fs`` tier, as one that sweeps what its killed writers left."""

    def __init__(self, tier: str, folder: Path) -> None:
        self.tier = tier
        self._folder = folder

    def kill(self) -> None:
        """Kill its processes."""
        for pid in tier_processes(self.tier):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def leave_unfinished(self) -> None:
        """Put a temporary file into some fan-out folder, by the name of each writer there is.

        Into one that its marker names; if there is none, as an older kvtier did, which named none.
        """
        for marker in list(self._folder.glob(f"*/{MARKERS_NAME}/*")):
            base = marker.parents[1]
            named = folders_untrusted(marker.read_bytes()) or set()
            there = [base / name for name in sorted(named) if (base / name).is_dir()]
            if not there:
                os.truncate(marker, 0)
            for fan_out in islice(there or base.glob("???/??"), 1):
                (fan_out / f"unfinished.{marker.name}-0.tmp").touch()

    def leftovers(self) -> Sequence[str]:
        """Return the names of blocks that are only written so far, by whoever."""
        return [
            name
            for _, _, names in os.walk(self._folder)
            for name in names
            if parse_temporary_untrusted(name) is not None
        ]


class Rest:
    """Goes through phase two. Raises ``Failure``."""

    def __init__(
        self, session: Session, record: Record, sample: Callable[[], None], limits: Limits
    ) -> None:
        self._session = session
        self._limits = limits
        self._sample = sample
        self._checks = record.checks

    def breakers_close(self) -> None:
        """Serve requests until all tiers are given work again.

        A breaker that failed stores have opened closes with a store. A tier that has all blocks by
        now, since those stores ended late, is given none: then weights change, and it has nothing.
        """
        load = self._session.load
        began = load.counts.decided

        def are_closed() -> bool:
            nonlocal began
            if load.counts.decided - began > SOME_REQUESTS:
                began = load.counts.decided
                load.reset(f"after request {began}", changes_weights=True)
            return self._are_closed()

        took_s = self._step_until(are_closed, "breakers stay open", self._breakers_in_words)
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

    def fs_has_more(self) -> None:
        """Serve requests until ``fs`` has blocks that it would be read for: some to damage."""
        resident = self._session.checker.resident

        def has_more() -> bool:
            return len(resident.get(FS, set()) - resident[PRIMARY]) >= DAMAGED_MAX

        self._step_until(has_more, "fs has few blocks", self._tiers_in_words)

    def nothing_is_held(self) -> None:
        """Begin no more requests; see that every slot is free or ready, and nothing in flight."""
        load, facade = self._session.load, self._session.facade
        load.aborts = False  # what never ends must show

        def is_quiet() -> bool:
            now = facade.statistics().primary
            held = now.pinned_slots or now.quarantined_slots or now.promotion_slots or now.requests
            whole = now.free_slots + now.ready_slots == now.slot_count
            return load.is_idle() and not facade.get_finished() and whole and not held

        took_s = self._step_until(is_quiet, "not at rest", self._primary_in_words, requests_max=0)
        load.aborts = True
        self._checks["slots"] = f"all free or ready after {took_s:.1f} s"

    def restart_twice(self, layer: Swept) -> None:
        """Kill a tier and see it back, twice: each start sweeps what dead writers have left.

        They are known by their markers. If harm took that of the last process, the first start
        makes one, and the second start finds it.
        """
        for start in range(2):
            if start:
                layer.leave_unfinished()
            broke = self._times_broken(layer.tier)
            layer.kill()

            def is_back(broke: int = broke) -> bool:
                # The breaker stays closed until the runtime has noticed, and closes with the start.
                # A second kill before that would find no process, so there would be one start.
                return self._times_broken(layer.tier) > broke and self._are_closed()

            self._step_until(is_back, "a killed tier stays away", self._breakers_in_words)

    def leftovers_go(self, layer: Swept) -> None:
        """See that no temporary file is left, now that nothing is stored."""
        left: Sequence[str] = ()
        looked_s = 0.0

        def swept() -> bool:
            nonlocal left, looked_s
            if time.monotonic() - looked_s > LOOK_S:
                left, looked_s = layer.leftovers(), time.monotonic()
                return not left
            return False

        self._step_until(swept, "temporary files are left", lambda: str(left[:3]), requests_max=0)
        self._checks["leftovers"] = "what killed writers left is swept"

    def events_fold(self, residency: Residency) -> None:
        """See that events tell what tiers have, now that nothing is under way."""
        differs: str | None = None
        looked_s = 0.0

        def same() -> bool:
            nonlocal differs, looked_s
            if time.monotonic() - looked_s > 4 * LOOK_S:
                told, mark = self._session.checker.resident, self._session.mark
                found = residency.difference(told, mark)
                looked_s = time.monotonic()
                if found is not None:
                    differs = found
                    residency.ask()  # in case that it was told only now
                return found == ""
            return False

        damaged = self._find_damaged(residency)
        residency.ask()
        self._step_until(same, "events tell what tiers don't have", lambda: f"{differs}", 0)
        what = "fold to what memory and disk have; fs has what is told"
        self._checks["events"] = f"{what}, without {damaged} damaged blocks"

    def _find_damaged(self, residency: Residency) -> int:
        """Have ``fs`` come upon damaged blocks, which it removes; returns how many there are."""
        load, resident = self._session.load, self._session.checker.resident
        damaged = residency.damage(resident.get(FS, set()) - resident[PRIMARY], self._session.mark)
        for key in damaged:
            load.find((key,), 1 << FS)
        what = "damaged blocks are waited for"
        self._step_until(load.is_idle, what, self._tiers_in_words, requests_max=0)
        return len(damaged)

    def resources_are_as(self, before: Resources, kept_bytes: int) -> None:
        """Compare what the process holds with what it held before the faults.

        ``kept_bytes``: memory that the run's own record takes.
        """
        left: dict[str, str] = {}

        def same() -> bool:
            nonlocal left
            now = resources_now(kept_bytes)
            left = now.left_since(before, judges_memory=self._limits.judges_memory)
            return not left

        self._step_until(same, "not as before the faults", lambda: str(left), requests_max=0)
        memory = " and memory" * self._limits.judges_memory
        self._checks["resources"] = f"descriptors, threads, processes{memory} are as before"

    def _times_broken(self, name: str) -> int:
        return sum(
            tier.counts.crashes for tier in self._session.statistics().tiers if tier.name == name
        )

    def _are_closed(self) -> bool:
        return all(tier.breaker == "CLOSED" for tier in self._session.statistics().tiers)

    def _breakers_in_words(self) -> str:
        return str({tier.name: tier.breaker for tier in self._session.statistics().tiers})

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
            is_late = time.monotonic() - began_s > self._limits.late_s_max
            if counted_s > self._limits.recovery_s_max or is_late:
                raise Failure(f"{what} {counted_s:.0f} s after the last fault: {tell()}")
            self._session.load.step(requests_max)
            counted_s += self._session.checker.step_s
            self._sample()
        return counted_s
