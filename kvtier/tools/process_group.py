"""Runs a part of a command in a process group of its own, which doesn't outlive the command's call.

A ``Popen`` that Ctrl-C interrupts has often started its program already, and leaves it running
unnoticed. So signals wait until it can be killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from kvtier.tools.held_signals import HeldSignals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@contextmanager
def process_group(arguments: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:  # noqa: ANN401 - Popen's
    """Start a program, and kill it with all its children when the block is left.

    Options are those of ``Popen``. Ctrl-C in a terminal reaches only the calling process.
    Any thread may call it. Raises ``OSError`` if the program can't be started.
    """
    with HeldSignals() as signals:
        child = subprocess.Popen(arguments, start_new_session=True, **options)  # noqa: S603 - ours
        try:
            signals.let_through()
            yield child
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
