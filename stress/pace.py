"""How the time of a plan passes: by the clock, or in the gate by what was done.

In the gate a second of the plan is so many requests that were decided. Where all requests wait,
it is so many steps that had nothing to do, or what hangs would keep the plan from ending that.
Both take longer on a busy machine, so that a fault meets as much as on one that is idle. And
nothing that is well misses a deadline: limits are ``PATIENCE_S``, but while something hangs the
scheduler's clock leaps past all of them.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from stress.failure import Failure
from stress.limits import PATIENCE_S
from stress.plan import draw_round

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from stress.plan import Fault, Plan

    Missing = Callable[[], Mapping[str, Collection[str]]]

FAULTS_A_STEP_MAX: Final = 3
"""A machine that is late catches up while it serves; what it can't is left out at the end."""

REQUESTS_A_SECOND: Final = 1500.0  #: about as many as there are by the clock
IDLE_STEPS_A_SECOND: Final = 1000.0
GATE_S_MAX: Final = 3 * PATIENCE_S
"""So long faults may last in the gate until all is shown that they are to show."""

HANGS: Final = frozenset({"hang", "stop", "fs_hang", "server_stopped"})
"""Kinds of faults that only a deadline ends, while they last."""

LEAP_S: Final = 2 * PATIENCE_S
LEAPS_AT: Final = (0.25, 0.75)  #: of the time that something hangs


class ByClock:
    """The plan's seconds are the clock's."""

    def __init__(self, plan: Plan) -> None:
        self.leapt_s = 0.0  #: by so much the scheduler's clock is ahead
        self._seconds = plan.seconds
        self._waiting = deque(plan.faults)
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        """Return the time of the plan."""
        return time.monotonic() - self._began_s

    def due(self) -> Sequence[Fault]:
        """Return the faults that are to begin now."""
        return _due(self._waiting, self.now_s())

    def step(self, decided: int) -> None:
        """Note nothing."""

    def is_over(self) -> bool:
        """Tell whether the time is up."""
        return self.now_s() >= self._seconds


class ByCounts:
    """The plan's seconds are requests and steps, and it ends when all is shown."""

    def __init__(self, plan: Plan, missing: Missing) -> None:
        """``missing``: returns what is not shown yet, in words → the kinds that may yet show it."""
        assert plan.gate is not None, "a plan of the clock's"
        self.leapt_s = 0.0
        self._seed = plan.seed
        self._kinds = plan.gate
        self._missing = missing
        self._now_s = 0.0
        self._leaps: list[float] = []
        self._rounds = 0
        self._give_up_s = time.monotonic() + GATE_S_MAX
        self._begin_round(plan.faults)

    def now_s(self) -> float:
        """Return the time of the plan's round."""
        return self._now_s

    def due(self) -> Sequence[Fault]:
        """Return the faults that are to begin now."""
        due = _due(self._waiting, self._now_s - self._round_began_s)
        for fault in due:
            if fault.kind in HANGS:
                self._leaps += [self._now_s + part * fault.for_s for part in LEAPS_AT]
        return due

    def step(self, decided: int) -> None:
        """Note a step in which so many requests were decided."""
        idle_s = 0.0 if decided else 1 / IDLE_STEPS_A_SECOND
        self._now_s += decided / REQUESTS_A_SECOND + idle_s
        past = [at_s for at_s in self._leaps if at_s <= self._now_s]
        if past:
            self._leaps = [at_s for at_s in self._leaps if at_s > self._now_s]
            self.leapt_s += LEAP_S

    def is_over(self) -> bool:
        """Tell whether all is shown. Raises ``Failure`` if it isn't after a long while."""
        is_late = time.monotonic() > self._give_up_s
        if self._now_s < self._round_ends_s and not is_late:
            return False
        missing = self._missing()
        if not missing:
            return True
        if is_late:
            raise Failure(f"the run has not shown within {GATE_S_MAX:g} s: {'; '.join(missing)}")
        again = {kind for kinds in missing.values() for kind in kinds}
        self._rounds += 1
        kinds = [kind for kind in self._kinds if kind.name in again]
        self._begin_round(draw_round(self._seed, self._rounds, kinds))
        return False

    def _begin_round(self, faults: Sequence[Fault]) -> None:
        self._round_began_s = self._now_s
        self._waiting = deque(faults)
        # A round of no faults, too, has a moment in which tiers can serve.
        lasts_s = max((fault.at_s + fault.for_s for fault in faults), default=0.0)
        self._round_ends_s = self._now_s + max(lasts_s, 0.5)


def _due(waiting: deque[Fault], now_s: float) -> list[Fault]:
    found: list[Fault] = []
    while waiting and waiting[0].at_s <= now_s and len(found) < FAULTS_A_STEP_MAX:
        found.append(waiting.popleft())
    return found
