"""Stops a backend's threads in the middle of a call, at a place that the check chooses.

So a check needs no storage that hangs, and its result does not depend on the speed of threads: a
stopped thread simulates storage that hangs.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import thread as executor
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

STOPPED_S_MAX: Final = 5.0
"""Time after which a stopped thread continues by itself, in case it holds a lock that the event
loop needs; the check then ends."""

ALONE_LOOKS_MAX: Final = 1000
ALONE_LOOK_S: Final = 0.001
"""Number and length of waits while a thread runs by itself."""

NEVER_STOPPED_IN: Final = frozenset(each.__file__ for each in (threading, queue, executor))
"""Source files in whose functions no thread is stopped: there it may hold a lock of the executor of
``asyncio.to_thread``, which the event loop takes for each call."""

WAITING_CALLS: Final = frozenset({"get", "acquire", "wait", "select", "poll", "recv", "accept"})
"""Functions in C in which a thread waits for work."""


class StoppedThreads:
    """Stops the threads that are started while this is entered.

    A thread is stopped when it calls a function or returns from one, by a profile
    function, except within the standard library's own handling of threads. Threads that run
    no Python code are not seen, and never stopped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self._events_left: int | None = None
        self._waiting_in: dict[int, str] = {}  # of each thread that was stopped: in which call
        self._has_given_up = False

    def __enter__(self) -> Self:
        self._before = threading.getprofile()
        threading.setprofile(self._at_event)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(self._before)
        self.go_on()

    def stop_after(self, events: int) -> None:
        """Stop each thread at its next call or return, after ``count`` of all threads together."""
        with self._lock:
            self._waiting_in.clear()
            self._events_left = events
            self._may_go_on.clear()

    def go_on(self) -> None:
        """Let all threads run."""
        with self._lock:
            self._events_left = None
            self._may_go_on.set()

    def go_on_alone(self, until: Callable[[], bool]) -> None:
        """Let all threads run while the caller waits, until ``until()`` or they wait for work.

        The caller is the event loop: work that needs it does not continue.
        """
        self.go_on()
        for _ in range(ALONE_LOOKS_MAX):
            if until() or self._waiting_in.keys() <= self._idle():
                return
            threading.Event().wait(ALONE_LOOK_S)

    @property
    def has_stopped_one(self) -> bool:
        """Whether a thread was stopped since ``stop_after``."""
        return bool(self._waiting_in)

    @property
    def has_given_up(self) -> bool:
        """Whether a thread continued by itself: its state is then unknown."""
        return self._has_given_up

    def _idle(self) -> set[int]:
        alive = {thread.ident for thread in threading.enumerate()}
        waiting_in = self._waiting_in.copy().items()
        return {each for each, call in waiting_in if call in WAITING_CALLS or each not in alive}

    def _at_event(self, frame: FrameType, event: str, arg: Any) -> None:  # noqa: ANN401
        thread = threading.get_ident()
        begins = getattr(arg, "__name__", "") if event == "c_call" else ""
        if thread in self._waiting_in:
            self._waiting_in[thread] = begins
        if self._events_left is None or frame.f_code.co_filename in NEVER_STOPPED_IN:
            return
        with self._lock:
            if self._events_left is None:
                return
            if self._events_left > 0:
                self._events_left -= 1
                return
            self._waiting_in[thread] = ""
        if not self._may_go_on.wait(STOPPED_S_MAX):
            self._has_given_up = True
            self.go_on()
        with self._lock:
            if thread in self._waiting_in:  # unless it is late, and another stop has begun
                self._waiting_in[thread] = begins  # in which it may wait: no event comes then
