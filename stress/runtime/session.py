"""One runtime from its opening to its end, with the load that it serves."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from kvtier import Namespace, RuntimeConfig, SlotMemory, open_runtime
from kvtier.core.events import PRIMARY
from kvtier.hosts import process_host, thread_host
from kvtier.tools.report.soak import Sample
from stress.checker import Checker
from stress.contents import BLOCK_BYTES
from stress.failure import Failure
from stress.limits import PATIENCE_S
from stress.load import Counts, Load
from stress.resources import resident_bytes

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping

    from kvtier.core.statistics import Statistics
    from stress.limits import Limits
    from stress.log_file import Noticed

SLOTS: Final = 96
RESTART_PAUSE_S: Final = 0.05
RESTART_PAUSE_S_MAX: Final = 0.5
CLOSE_S: Final = 5.0
HUNG_CLOSE_S: Final = 3.0
"""In the gate: so long a close waits for a tier that hangs."""


class Session:
    """One runtime. Raises what ``open_runtime`` raises."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        clock: Callable[[], float],
        dice: random.Random,
        counts: Counts,
        noticed: Noticed,
        limits: Limits,
    ) -> None:
        config = RuntimeConfig.from_mapping(
            {"close_timeout_s": CLOSE_S, **settings}, slot_count=SLOTS, block_bytes=BLOCK_BYTES
        )
        self._limits = limits
        self.keeps_on_reset = config.keeps_on_reset
        self.tiers = [tier.name for tier in config.tiers]
        self.opened: set[str] = set()  #: tiers that a sample has found open, once at least
        self.memory = SlotMemory.anonymous(SLOTS, BLOCK_BYTES)
        try:
            self.facade = open_runtime(
                config, self.memory, Namespace({"soak": True}), collect_events=True, clock=clock
            )
        except BaseException:
            self.memory.release()
            raise
        self.checker = Checker(self.memory, noticed, limits.pending_s_max)
        self.load = Load(self.facade, self.memory, self.checker, dice, counts)

    @property
    def mark(self) -> bytes:
        """What marks the keys of the weights that the engine has now, in tiers."""
        mark: bytes = self.facade._generations.mark  # noqa: SLF001 - nobody else needs to know it
        return mark

    def statistics(self) -> Statistics:
        """Return the runtime's."""
        return self.facade.statistics()

    def sample(self, at_s: float) -> Sample:
        """Return this moment."""
        now, counts = self.statistics(), self.load.counts
        self.opened |= {tier.name for tier in now.tiers if tier.breaker != "DISABLED"}
        resident = self.checker.resident
        return Sample(
            at_s=round(at_s, 3),
            requests=counts.requests,
            blocks_read=counts.blocks_read,
            blocks_stored=counts.blocks_stored,
            lookups=counts.lookups,
            hits=counts.hits,
            resident={
                "primary": len(resident[PRIMARY]),
                **{name: len(resident.get(n, ())) for n, name in enumerate(self.tiers)},
            },
            breakers={tier.name: tier.breaker for tier in now.tiers},
            quarantined=now.primary.quarantined_slots,
            memory_bytes=resident_bytes(),
        )

    def close(self) -> bool:
        """End the runtime. False: a tier hangs, and its memory must stay. Raises ``Failure``."""
        began_s = time.monotonic()
        is_quiet = self.facade.close()
        if time.monotonic() - began_s > self._limits.close_s_max:
            raise Failure(f"close took {time.monotonic() - began_s:.1f} s")
        if is_quiet:
            self.memory.release()
        return is_quiet

    def close_patiently(self, *, hangs: bool) -> bool:
        """Do the same in the gate: only what hangs is given up. ``hangs``: a tier may.

        False: one is in a call that can't be interrupted, if it isn't just slow to end.
        """
        self.facade._close_timeout_s = HUNG_CLOSE_S if hangs else PATIENCE_S  # noqa: SLF001 - no other may change it
        return self.close()

    def wait_until_ended(self) -> bool:
        """Wait for what was given up at close, and hangs no more."""
        tiers = self.facade._tiers  # noqa: SLF001 - a facade that is closed says nothing any more
        has_ended = all(tier.wait_until_ended(PATIENCE_S) for tier in tiers)
        if has_ended:
            self.memory.release()
        return has_ended


@contextmanager
def quick_restarts() -> Iterator[None]:
    """Shorten the pauses before a tier is begun anew: one that is killed often is to run, too."""
    with (
        mock.patch.object(process_host, "RESTART_PAUSE_S", RESTART_PAUSE_S),
        mock.patch.object(process_host, "RESTART_PAUSE_S_MAX", RESTART_PAUSE_S_MAX),
        mock.patch.object(thread_host, "RESTART_PAUSE_S", RESTART_PAUSE_S),
    ):
        yield
