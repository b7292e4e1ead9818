"""Defers Ctrl-C and SIGTERM to a point where an interruption does no harm.

A ``KeyboardInterrupt`` is raised between any two instructions. If it strikes just after
``threading.Condition`` has taken its lock, the lock is never released, and ending the threads that
need it waits for ever.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

_HELD: Final = (signal.SIGINT, signal.SIGTERM)


class HeldSignals:
    """A block in which these signals wait until one of the two functions, or the block's end.

    Any thread may use it; no signal interrupts another than the main thread.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._handlers: dict[signal.Signals, Any] = {}  # previous ones; empty: none deferred

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _HELD:
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.let_through()

    def check(self) -> None:
        """If a signal has arrived, let it through, as ``let_through`` does; else keep waiting."""
        if self._came:
            self.let_through()

    def let_through(self) -> None:
        """Stop deferring. A signal that has arrived strikes now, often as ``KeyboardInterrupt``."""
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        while self._came:
            signal.raise_signal(self._came.pop())

    def _note(self, number: int, _frame: object) -> None:
        self._came.append(number)


@contextmanager
def terminable() -> Iterator[Callable[[], bool]]:
    """Handle SIGTERM like Ctrl-C; yield a function that returns whether it has arrived."""
    came = threading.Event()

    def interrupt(*_: object) -> None:
        came.set()
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
