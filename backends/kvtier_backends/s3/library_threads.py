"""Accounts for the library's threads: the views that they may still read, and how they end.

The library keeps a view of a slot exported for as long as it may read it, also after its call has
ended, and an exported view can't be released: so an attempt to release it shows whether it is still
in use.

obstore ends each call in a thread of its own, which checks whether the call's future was cancelled
and otherwise has the event loop settle it; a moment later it releases the interpreter. Up to
Python 3.13, a thread that wants the interpreter's lock during shutdown is ended itself, and then
Rust aborts the process. The library can't be stopped (PyO3/pyo3-async-runtimes#40), and no wait
is long enough on a busy machine. But its check of the future shows that the thread exists;
and a thread that may still want the lock is within a frame of Python. So they are made to release
Python before the interpreter ends.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import ref

if TYPE_CHECKING:
    import asyncio


class LentBuffers:
    """Counts the lent views. Any thread may call ``count``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: list[memoryview] = []

    def lend(self, buffer: memoryview) -> memoryview:
        """Return a view of the buffer for one call of the library. Give it back afterwards."""
        return buffer.toreadonly()

    def give_back(self, view: memoryview) -> None:
        """Take back a view after its call has ended in any way."""
        if not _is_released(view):
            with self._lock:
                self._lent.append(view)

    def count(self) -> int:
        """Return how many views may still be read although their call has ended."""
        if not self._lent:
            return 0
        with self._lock:
            self._lent = [view for view in self._lent if not _is_released(view)]
            return len(self._lent)


def _is_released(view: memoryview) -> bool:
    try:
        view.release()
    except BufferError:
        return False
    return True


T = TypeVar("T")

LET_GO_S_MAX: Final = 2.0
"""Only a call that ends in an unknown way takes this long."""

_POLL_S: Final = 0.001


class LibraryThreads:
    """Calls whose thread has not appeared yet, and the threads that have."""

    def __init__(self) -> None:
        self._calls: dict[int, ref[asyncio.Future[Any]]] = {}  # weakly: a result is a whole block
        self._came: set[int] = set()
        self.is_ending = False  #: no call may begin any more

    def watch(self, call: asyncio.Future[T]) -> asyncio.Future[T]:
        """Track a call that has just begun, and return it. Its loop's thread only."""
        number, loop_thread, is_cancelled = id(call), threading.get_ident(), type(call).cancelled
        calls, came = self._calls, self._came
        weakly = ref(call, lambda _: calls.pop(number, None))

        def cancelled() -> bool:
            thread = threading.get_ident()
            if thread != loop_thread:
                came.add(thread)
                calls.pop(number, None)
            known = weakly()
            return known is None or is_cancelled(known)

        calls[number] = weakly
        call.cancelled = cancelled  # type: ignore[method-assign]
        return call

    def release(self) -> None:
        """Cancel running calls, and wait until no thread of the library wants the lock."""
        self.is_ending = True
        deadline_s = time.monotonic() + LET_GO_S_MAX
        while self._are_there() and time.monotonic() < deadline_s:
            for weakly in tuple(self._calls.values()):
                call = weakly()
                if call is not None and not call.done():
                    with suppress(RuntimeError):  # its loop is closed
                        call.get_loop().call_soon_threadsafe(call.cancel)
            time.sleep(_POLL_S)  # this releases the lock

    def _are_there(self) -> bool:
        frames = sys._current_frames()  # noqa: SLF001 - nothing else tells which threads have one
        return bool(self._calls) or not self._came.isdisjoint(frames)


THREADS: Final = LibraryThreads()
atexit.register(THREADS.release)
