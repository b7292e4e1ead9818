"""Whether a test was starved: how long its process was not run, and how busy the machine was.

A test that failed says so itself (``tests/conftest.py``), so that a slow machine is a fact in
the log and not a guess. A thread looks at the clock often; the longest time between two looks
is a time in which nothing of this process could run.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

LOOK_S: Final = 0.05
NAME: Final = "kvtier-tests-starvation"


class Starvation:
    """Watches this process. ``start`` it once; ``begin`` it for each test."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._began_s = time.monotonic()

    def start(self) -> None:
        """Watch until the process ends. A fork is not watched."""
        threading.Thread(target=self._watch, name=NAME, daemon=True).start()

    def begin(self) -> None:
        """Forget what was seen: a test begins."""
        self._longest_s = 0.0
        self._began_s = time.monotonic()

    def told(self) -> str:
        """Return what a failure says."""
        ran_s = time.monotonic() - self._began_s
        load = " ".join(f"{each:.1f}" for each in os.getloadavg())
        return (
            f"after {ran_s:.1f} s, of which this process was not run for {self._longest_s:.2f} s "
            f"at a stretch, at most; load {load} on {os.cpu_count()} cores"
        )

    def _watch(self) -> None:
        last_s = time.monotonic()
        while True:
            time.sleep(LOOK_S)
            now_s = time.monotonic()
            self._longest_s = max(self._longest_s, now_s - last_s - LOOK_S)
            last_s = now_s
