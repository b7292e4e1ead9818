"""Writes a file whole, or not at all: reports of the ``kvtier`` command."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def write_whole(path: str | Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a file beside ``path``, then move it there. Leaves nothing else behind.

    Raises ``Misuse`` if the place can't be written to.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    with _refusing(path):
        try:
            write(unfinished)
            unfinished.replace(path)
        finally:
            with suppress(OSError):
                unfinished.unlink()


def write_named(path: str | Path, write: Callable[[Path], object]) -> None:
    """Write to a path that the user named: by ``write_whole`` if it is a file, or none yet.

    Links are followed. Anything but a plain file, such as ``/dev/null`` or a pipe, is written to
    directly: it must not be replaced. Raises ``Misuse`` as ``write_whole`` does.
    """
    if is_special(path):
        with _refusing(path):
            write(Path(path))
    else:
        write_whole(Path(path).resolve(), write)


def is_special(path: str | Path) -> bool:
    """Return whether something is there that is neither a file nor a folder: a device, a pipe."""
    there = Path(path)
    return there.exists() and not (there.is_file() or there.is_dir())


@contextmanager
def _refusing(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Misuse(f"{path}: cannot be written: {error.strerror or error}.") from error
