"""Holds the time limit of the backend call that runs here.

A request waiting for a probe, a load or a store gives it up at a deadline. A driver of remote
storage passes on the rest of that time, so that no connection, retry or thread is kept
for a result that is no longer waited for.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

NEVER: Final = math.inf
"""The deadline of a call without one."""

_deadline: ContextVar[float] = ContextVar("kvtier_deadline", default=NEVER)


def time_left_s() -> float:
    """Return the seconds for which this call is still waited for.

    Infinite for a call without a deadline, such as ``remove``; at least 0. Call it in the task that
    runs the backend's call: threads to which that hands work have no deadline of their own.
    """
    return max(0.0, _deadline.get() - time.monotonic())


def set_deadline(monotonic_s: float) -> None:
    """Set the deadline of the task that runs here, in seconds of ``time.monotonic``."""
    _deadline.set(monotonic_s)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Limit the code in this block to ``seconds``: for tests, and for calls within a call."""
    token = _deadline.set(min(_deadline.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)
