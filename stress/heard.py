"""What a soak and all its processes write to the standard error stream: nothing, or it failed.

What a thread, a destructor or a forgotten coroutine raises reaches nobody but that stream.
kvtier's own log goes elsewhere, so whatever is read there was meant for no one.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_STREAM: Final = 2
_TOLD_MAX: Final = 4000  #: characters of it that the verdict repeats
_OF_OTHERS: Final = ("Ignoring invalid max threads value",)
"""How lines begin that other programs write: libfuse."""


@contextmanager
def nothing_on_stderr(file: Path) -> Iterator[None]:
    """Have the stream go into ``file`` until the end of the block. Raises ``Failure`` by then."""
    sys.stderr.flush()
    screen = os.dup(_STREAM)
    heard = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(heard, _STREAM)
    os.close(heard)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(screen, _STREAM)
        os.close(screen)
    lines = file.read_text(errors="replace").splitlines()
    unexpected = [line for line in lines if line.strip() and not line.startswith(_OF_OTHERS)]
    if unexpected:
        text = "\n".join(unexpected)[:_TOLD_MAX]
        raise Failure(f"something was written to the standard error stream:\n{text}")
