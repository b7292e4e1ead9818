"""Limits how long a stopping engine waits for its tiers' jobs in flight.

vLLM's loop ends once nothing is pending. If storage hangs, stores stay pending for
``store_timeout_s``, and those behind them for as long again: vLLM killed the engine when its
``--shutdown-timeout`` was over, and no tier was closed. So they count as pending only until
``close_timeout_s`` after the last request. Closing then abandons the remaining ones.
"""

from __future__ import annotations

import time
from typing import Any, Final


class Ending:
    """Shutdown of this process's engine: vLLM has one engine core a process. Its thread only."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # without a request

    def look(self, engine: Any) -> None:  # noqa: ANN401 - vLLM has no stubs
        """Note whether vLLM's ``EngineCoreProc`` is waiting only for its tiers."""
        if not engine.shutdown_state or engine.scheduler.has_unfinished_requests():
            self._since_s = None
        elif self._since_s is None:
            self._since_s = time.monotonic()

    def has_lasted(self, seconds: float) -> bool:
        """Return whether it has waited only for its tiers for more than ``seconds``."""
        return self._since_s is not None and time.monotonic() - self._since_s > seconds


ENDING: Final = Ending()
