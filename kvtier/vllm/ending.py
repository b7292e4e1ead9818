"""How long an engine that was asked to end waits for what its tiers have under way.

vLLM's loop ends once nothing is pending. With storage that hangs, stores are for as long as
``store_timeout_s``, and those behind them for as long again: vLLM killed the engine when its
``--shutdown-timeout`` was over, and no tier was closed. So they count for ``close_timeout_s`` after
the last request. Closing gives up what is left then.
"""

from __future__ import annotations

import time
from typing import Any, Final


class Ending:
    """The end of this process's engine: vLLM has one engine core a process. Its thread only."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # without a request

    def look(self, engine: Any) -> None:  # noqa: ANN401 - vLLM has no stubs
        """Note whether vLLM's ``EngineCoreProc`` has only its tiers to wait for."""
        if not engine.shutdown_state or engine.scheduler.has_unfinished_requests():
            self._since_s = None
        elif self._since_s is None:
            self._since_s = time.monotonic()

    def has_lasted(self, seconds: float) -> bool:
        """Tell whether that has been so for longer than so many seconds."""
        return self._since_s is not None and time.monotonic() - self._since_s > seconds


ENDING: Final = Ending()
