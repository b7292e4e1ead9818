"""How long the call of a backend that runs here may take.

What waits for a probe, a load or a store gives it up at a deadline. A driver of remote
storage hands on what is left of that time, so that no connection, retry or thread is kept
for what nobody waits for any more.
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
"""The deadline of what has none."""

_deadline: ContextVar[float] = ContextVar("kvtier_deadline", default=NEVER)


def time_left_s() -> float:
    """Return in how many seconds nobody waits for this call any more.

    Infinite for a call without a deadline, such as ``remove``; at least 0. To be called in the
    task that runs the call: a thread that the task hands work to has no deadline of its own.
    """
    return max(0.0, _deadline.get() - time.monotonic())


def set_deadline(monotonic_s: float) -> None:
    """Set the deadline of the task that runs here, in seconds of ``time.monotonic``."""
    _deadline.set(monotonic_s)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Give what runs in here so many seconds: for tests, and for calls within a call."""
    token = _deadline.set(min(_deadline.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)
