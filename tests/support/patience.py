"""How long a test waits for what must come: so long that only a hang reaches it.

A shorter time makes a test depend on what else the machine does. What must
*not* wait is shown by an order of events, or by a count, not by a clock. A time
that is meant to run out may be short: it is the setting of a tier or of a
folder under test, and reads so (``promote_timeout_s=0.01``).
``tests/house/test_house_of_tests.py`` looks for others.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S: Final = 120.0
POLL_S: Final = 0.005


def pause() -> None:
    """Let other threads and processes run, between two looks at what they do."""
    threading.Event().wait(POLL_S)


def looks(tell: Callable[[], Any] = lambda: "") -> Iterator[None]:
    """Loop over this, and leave the loop, where looking itself is what lets others go on."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        yield
        assert time.monotonic() < deadline_s, tell() or "it never came to pass"


def until(done: Callable[[], object], tell: Callable[[], Any] = lambda: "") -> None:
    """Wait for what another thread or process does; ``tell`` says what is so instead."""
    for _ in looks(tell):
        if done():
            return
        pause()


async def until_true(done: Callable[[], object], tell: Callable[[], Any] = lambda: "") -> None:
    """Wait for what happens on the event loop or elsewhere, as ``until`` does."""
    for _ in looks(tell):
        if done():
            return
        await anyio.to_thread.run_sync(pause)
