"""Slows a thread down: others of the process wait for the interpreter while it works."""

from __future__ import annotations

import time
from typing import Final

WORK_S: Final = 0.005
"""It works for so long at a stretch: about as long as Python lets a thread keep the interpreter."""


class Pace:
    """Has one thread work for a part of the time. That thread only."""

    def __init__(self, duty: float) -> None:
        """``duty``: the part, above 0; with 1 it never rests. Waiting for storage is no work."""
        self._rest_share = 1 / duty - 1
        self._worked_s = time.thread_time()

    def rest(self) -> None:
        """Wait, if enough work was done. Called often: between two folders, say."""
        worked_s = time.thread_time() - self._worked_s
        if self._rest_share and worked_s >= WORK_S:
            time.sleep(worked_s * self._rest_share)
            self._worked_s = time.thread_time()
