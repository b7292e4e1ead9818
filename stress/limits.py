"""How long a run waits before it says that something never came.

By the clock, recovery within a minute is one of the promises. In the gate (``--gate``) a busy
machine must not decide anything: there only a hang reaches a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PATIENCE_S: Final = 300.0
"""So long the gate waits for each thing that must come."""


@dataclass(frozen=True)
class Limits:
    """One run's."""

    pending_s_max: float  #: lookups may say None
    recovery_s_max: float  #: tiers may stay away, counted in short steps
    late_s_max: float  #: the same on the clock
    close_s_max: float  #: a runtime may take to close
    judges_memory: bool  #: how much memory a process has grown says something


BY_CLOCK: Final = Limits(
    pending_s_max=30.0,
    recovery_s_max=60.0,
    late_s_max=240.0,
    close_s_max=30.0,
    judges_memory=True,
)
"""Three tiers, each asked and read once, in vain, take some 2 s: the rest of the time for lookups
and for closing is room for a busy machine, and for the requests before this one. One that others
use too may also take longer to recover: waiting ends after four times the limit, and what counts
is the time in which steps were short (``Checker.step_s``)."""

PATIENT: Final = Limits(
    pending_s_max=PATIENCE_S,
    recovery_s_max=PATIENCE_S,
    late_s_max=PATIENCE_S,
    close_s_max=float("inf"),
    judges_memory=False,
)
"""The gate's. What grows in seconds is mostly caches: a leak shows in an hour."""


def limits_of(*, is_gate: bool) -> Limits:
    """Return a run's limits."""
    return PATIENT if is_gate else BY_CLOCK
