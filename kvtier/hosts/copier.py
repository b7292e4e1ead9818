"""Copies blocks between another program's slots and staging slots, on a thread of its own.

It touches only memory: a copy ends soon, whatever storage does. NumPy releases
the GIL for each block.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvtier.plugin_api.log import log
from kvtier.plugin_api.threads import daemon_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtier.plugin_api.slot_memory import SlotMemory

_STOP: Final = None


class _Copy(NamedTuple):
    number: int
    slots: Sequence[int]
    staging: Sequence[int]
    to_staging: bool


class BlockCopier:
    """Carries out copies in the order in which they are started."""

    def __init__(self, name: str, slots: SlotMemory, staging: SlotMemory) -> None:
        """``slots``: the program's, released by ``stop``."""
        self._slots = slots
        self._ended: deque[tuple[int, bool]] = deque()
        self._program: NDArray[np.uint8] | None = _rows(slots)
        self._staging = _rows(staging)
        self._posted_blocks = 0  # written by the program's thread only
        self._ended_blocks = 0  # written by the copier's thread only
        self._queue: queue.SimpleQueue[_Copy | threading.Event | None] = queue.SimpleQueue()
        self._thread = daemon_thread(self._work, f"kvtier-{name}-copy")
        self._thread.start()

    def start(
        self, copy: int, slots: Sequence[int], staging: Sequence[int], *, to_staging: bool
    ) -> None:
        """Begin a copy with this number, between the program's slots and staging slots."""
        self._posted_blocks += len(slots)
        self._queue.put(_Copy(copy, slots, staging, to_staging))

    def pop_ended(self) -> list[tuple[int, bool]]:
        """Return the copies that have ended, and whether they succeeded."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def backlog_bytes(self) -> int:
        """Return the number of bytes still to copy."""
        return (self._posted_blocks - self._ended_blocks) * self._slots.block_bytes

    def wait_idle(self) -> None:
        """Wait until all posted copies have ended."""
        if self._thread.is_alive():
            reached = threading.Event()
            self._queue.put(reached)
            reached.wait()

    def stop(self) -> None:
        """Finish the posted copies, end the thread, and release the program's slots."""
        self._queue.put(_STOP)
        self._thread.join()
        self._program = None
        self._slots.release()

    def _work(self) -> None:
        while (work := self._queue.get()) is not _STOP:
            if isinstance(work, threading.Event):
                work.set()
            else:
                self._ended.append((work.number, self._copied(work)))
                self._ended_blocks += len(work.slots)

    def _copied(self, work: _Copy) -> bool:
        """Copy. Return False if the numbers are wrong: the blocks must not be used then."""
        program, staging = self._program, self._staging
        assert program is not None
        try:
            _check(work)
            for slot, staged in zip(work.slots, work.staging, strict=True):
                if work.to_staging:
                    staging[staged] = program[slot]
                else:
                    program[slot] = staging[staged]
        except Exception:  # noqa: BLE001 - the thread must go on, or a drain would wait for ever
            log.error("copy of blocks failed", exc_info=True)
            return False
        return True


def _check(work: _Copy) -> None:
    """Refuse numbers that NumPy would count from the end. It refuses too large ones itself."""
    if min((*work.slots, *work.staging), default=0) < 0:
        raise IndexError(work)


def _rows(memory: SlotMemory) -> NDArray[np.uint8]:
    """Return the slots as rows of bytes."""
    flat = np.frombuffer(memory.buffer, dtype=np.uint8)
    return flat.reshape(memory.slot_count, memory.block_bytes)
