"""Load priority for threads: while anything is loaded, stores that have begun pause between blocks.

A tier holds back the stores that its backend does not have yet. Those that it has are large
batches, several for each thread that writes: such a thread waits for its turn here before each
block. A load does not wait for a write in progress, so only few batches continue for a while after
a load, because another one often follows.

Requests wait for loads but not for stores. But loads that never pause would leave stores no time,
so that blocks leave DRAM before they are stored. So stores are held back for ``HELD_S_MAX``, and
then not at all for as long: for at most half of the time, even if a load hangs. Limiting the number
of threads alone is not enough: on a filesystem that serves many threads at once, a quarter of the
threads stores a quarter as much.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from itertools import count, islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HELD_S_MAX: Final = 1.0
"""Longest time for which loads may hold stores back. It recovers as fast as it is used up."""

LINGER_S: Final = 0.5
"""Time after a load during which only few batches continue."""

LOADING_BATCHES: Final = 1
"""Number of batches that continue during a load: the oldest ones."""

LINGERING_BATCHES: Final = 4
"""Number of batches that continue for a while after a load."""


class StoreTurns:
    """Loads and stores of one backend. Any thread may call any method."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = count()
        self._batches: dict[int, None] = {}  # in flight in threads, oldest first
        self._loads = 0
        self._linger_until = 0.0
        self._held_s = 0.0  # up to ``_counted_at``
        self._counted_at = 0.0
        self._is_free = False  # until ``_held_s`` is 0 again

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Hold stores back for as long as this block takes. Never waits."""
        with self._changed:
            self._count(time.monotonic())
            self._loads += 1
        try:
            yield
        finally:
            with self._changed:
                now = time.monotonic()
                self._count(now)
                self._loads -= 1
                self._linger_until = now + LINGER_S
                if not self._loads:
                    self._changed.notify_all()

    @contextmanager
    def storing(self) -> Iterator[Callable[[], None]]:
        """Count a batch as in flight in this thread. Yields the wait for the next block's turn."""
        with self._changed:
            batch = next(self._numbers)
            self._batches[batch] = None

        def wait_for_turn() -> None:
            # Without the lock: a load that begins just now may be seen a block later.
            if self._loads or time.monotonic() < self._linger_until:
                self._wait(batch)

        try:
            yield wait_for_turn
        finally:
            with self._changed:
                del self._batches[batch]
                self._changed.notify_all()  # another one is the oldest

    def _wait(self, batch: int) -> None:
        with self._changed:
            while (pause_s := self._pause_s(batch, time.monotonic())) > 0:
                self._changed.wait(pause_s)

    def _pause_s(self, batch: int, now: float) -> float:
        """Return for how long a batch is held back, unless something changes before."""
        self._count(now)
        going_on = LOADING_BATCHES if self._loads else LINGERING_BATCHES
        if self._is_free or batch in islice(self._batches, going_on):
            return 0.0
        left_s = HELD_S_MAX - self._held_s
        return left_s if self._loads else min(left_s, self._linger_until - now)

    def _count(self, now: float) -> None:
        """Count how long stores have been held back, and how long not."""
        if not self._is_free:
            end = now if self._loads else min(now, self._linger_until)
            self._held_s += max(0.0, end - self._counted_at)
            self._counted_at = max(end, self._counted_at)
            self._is_free = self._held_s >= HELD_S_MAX
        self._held_s = max(0.0, self._held_s - (now - self._counted_at))
        self._counted_at = now
        self._is_free = self._is_free and self._held_s > 0
