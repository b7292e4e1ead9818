"""Runs a part of a command in a process group of its own, which doesn't outlive the command's call.

A ``Popen`` that Ctrl-C interrupts has often started its program already, and
leaves it running with nobody to know it. So signals wait until it can be killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_HELD: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def process_group(arguments: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:  # noqa: ANN401 - Popen's
    """Start a program, and kill it with all that it has started when the block is left.

    Options are those of ``Popen``. Ctrl-C in a terminal reaches the calling process alone.
    Any thread may call it. Raises ``OSError`` if the program can't be started.
    """
    with _signals_held() as let_through:
        child = subprocess.Popen(arguments, start_new_session=True, **options)  # noqa: S603 - ours
        try:
            let_through()
            yield child
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@contextmanager
def _signals_held() -> Iterator[Callable[[], None]]:
    """Put signals off until the function that it yields is called, or the block is left."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # no signal interrupts another thread
        return
    held: list[int] = []
    handlers = [signal.signal(number, lambda number, _: held.append(number)) for number in _HELD]

    def let_through() -> None:
        for number, handler in zip(_HELD, handlers, strict=True):
            signal.signal(number, handler)
        while held:
            signal.raise_signal(held.pop())

    try:
        yield let_through
    finally:
        let_through()
