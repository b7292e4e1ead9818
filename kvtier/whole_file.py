"""Writes a file whole, or not at all: reports and pictures of the ``kvtier`` command."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Callable


def write_whole(path: str | Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a file beside ``path``, then put it there. Leaves nothing else behind.

    Raises ``Misuse`` if the place can't be written to.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        write(unfinished)
        unfinished.replace(path)
    except OSError as error:
        raise Misuse(f"{path}: cannot be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()
