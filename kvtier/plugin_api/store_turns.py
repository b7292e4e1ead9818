"""Load priority for threads: while anything is loaded, stores that have begun pause between blocks.

A tier holds back the stores that its backend does not have yet. Those that it has are large
batches, several for each thread that writes: such a thread waits for its turn here before each
block. What is being written when a load comes is not waited for here, so that few batches go on
for a while after a load: another one often follows.

Somebody waits for a load, and nobody for a store. Yet stores go on whatever the loads do: the
oldest batch does not pause, and once a pause has lasted for ``PAUSE_S_MAX``, what is being loaded
holds nothing back any more. It hangs, perhaps, and so may the oldest batch.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from itertools import count, islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAUSE_S_MAX: Final = 0.5
"""The longest pause before a block."""

LINGER_S: Final = 0.5
"""For so long after a load few batches go on."""

LINGERING_BATCHES: Final = 4
"""So many: the oldest ones."""


class StoreTurns:
    """Loads and stores of one backend. Any thread may call any method."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = count()
        self._loads: set[int] = set()  # those that hold stores back
        self._linger_until = 0.0
        self._batches: dict[int, None] = {}  # under way in threads, oldest first

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Hold stores back for as long as this takes. Never waits."""
        with self._changed:
            load = next(self._numbers)
            self._loads.add(load)
        try:
            yield
        finally:
            with self._changed:
                self._loads.discard(load)
                self._linger_until = time.monotonic() + LINGER_S
                if not self._loads:
                    self._changed.notify_all()

    @contextmanager
    def storing(self) -> Iterator[Callable[[], None]]:
        """Count a batch as under way in this thread. Gives what waits for the next block's turn."""
        with self._changed:
            batch = next(self._numbers)
            self._batches[batch] = None

        def wait_for_turn() -> None:
            # Without the lock: what begins to load just now may be seen a block later.
            if self._loads or time.monotonic() < self._linger_until:
                self._wait(batch)

        try:
            yield wait_for_turn
        finally:
            with self._changed:
                del self._batches[batch]
                self._changed.notify_all()  # another one is the oldest

    def _wait(self, batch: int) -> None:
        def has_turn() -> bool:
            if self._loads:
                return batch == next(iter(self._batches))
            lingers = time.monotonic() < self._linger_until
            return not lingers or batch in islice(self._batches, LINGERING_BATCHES)

        with self._changed:
            if not self._changed.wait_for(has_turn, PAUSE_S_MAX):
                self._loads.clear()
                self._changed.notify_all()
