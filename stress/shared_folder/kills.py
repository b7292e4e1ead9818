"""Kills engines at random moments and starts others, while somebody else measures their folder."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from stress.shared_folder.engines import StoringEngine


class KilledEngines:
    """Engines of which one is killed every now and then. Any thread may ask."""

    def __init__(
        self, make: Callable[[], StoringEngine], count: int, pause_s: float, chance: Random
    ) -> None:
        """Start so many. ``pause_s``: between two kills, on average."""
        self._make = make
        self._pause_s = pause_s
        self._chance = chance
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._ended = 0  # stored by those that were killed
        self.start_s = time.monotonic()
        self.kills_s: list[float] = []  #: since the start
        self._engines = [make() for _ in range(count)]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stored(self) -> int:
        """Return how many blocks all have stored. Raises ``RuntimeError`` if an engine failed."""
        with self._lock:
            if not all(each.is_alive() for each in self._engines):
                raise RuntimeError("an engine failed: see above")
            return self._ended + sum(each.stored for each in self._engines)

    def stop(self) -> None:
        """Kill all."""
        self._is_over.set()
        self._thread.join()
        for engine in self._engines:
            engine.kill()

    def _run(self) -> None:
        while not self._is_over.wait(self._chance.expovariate(1 / self._pause_s)):
            with self._lock:
                place = self._chance.randrange(len(self._engines))
                engine = self._engines[place]
                engine.kill()
                self.kills_s.append(time.monotonic() - self.start_s)
                self._ended += engine.stored
                self._engines[place] = self._make()
