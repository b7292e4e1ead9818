"""Clocks that jump: the scheduler's, forward, and the wall clock of the ``disk`` tier, anywhere.

The scheduler's clock is monotonic: it leaps when a machine was asleep, and never goes back. A
wall clock is set by people, before 1970 and after 2106 too.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from stress.plan import Kind
from stress.runtime.backends import CLOCK_FILE, set_wrong_by

if TYPE_CHECKING:
    from pathlib import Path

    from stress.plan import Fault

_YEAR_S: Final = 365.25 * 86400
_JUMPS_S: Final = (0.3, 1.0, 10.0, 600.0, 86400.0)
_WRONG_BY_S: Final = (-60.0, 60.0, -86400.0, 86400.0, -100 * _YEAR_S, 100 * _YEAR_S)

KINDS: Final = (
    Kind("clock_leaps", ("scheduler",), per_minute=6),
    Kind("wall_clock_is_wrong", ("disk",), per_minute=6, spell_s=(0.1, 5.0)),
)


class Clocks:
    """The clocks of one run."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "wall-clock-is-wrong-by"
        self._leapt_s = 0.0
        os.environ[CLOCK_FILE] = str(self._file)
        set_wrong_by(self._file, 0.0)

    def monotonic(self) -> float:
        """Return what the scheduler takes for the time."""
        return time.monotonic() + self._leapt_s

    def begin(self, fault: Fault) -> int:
        """Have a clock jump."""
        if fault.kind == "clock_leaps":
            self._leapt_s += fault.dice.choice(_JUMPS_S)
        else:
            set_wrong_by(self._file, fault.dice.choice(_WRONG_BY_S))
        return 1

    def end(self, fault: Fault) -> None:
        """Set the wall clock right."""
        if fault.kind == "wall_clock_is_wrong":
            set_wrong_by(self._file, 0.0)
