"""Slows a thread down: other threads of the process wait for the interpreter while it works."""

from __future__ import annotations

import time
from typing import Final

WORK_S: Final = 0.005
"""One stretch of work: about as long as Python lets a thread keep the interpreter."""


class Pace:
    """Limits one thread to a share of the time. Call it from that thread only."""

    def __init__(self, duty: float) -> None:
        """``duty``: the share, above 0; with 1 it never rests. Waiting for storage is not work."""
        self._rest_share = 1 / duty - 1
        self._worked_s = time.thread_time()

    def rest(self) -> None:
        """Wait, if enough work was done. Call it often, for example between two folders."""
        worked_s = time.thread_time() - self._worked_s
        if self._rest_share and worked_s >= WORK_S:
            time.sleep(worked_s * self._rest_share)
            self._worked_s = time.thread_time()
