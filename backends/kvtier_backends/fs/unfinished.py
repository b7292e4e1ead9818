"""Records the folders of a writer's unfinished files, so that a sweep need not walk all folders.

A block is written beside its place, in one of up to a million folders. (A folder for unfinished
files alone would be as easy to sweep; but Linux serializes renames between folders across
a filesystem, and over a network stores would wait for that.) So a writer's marker names
the folders that it is writing in: a record for each of its threads, overwritten in one call
before each batch. A killed writer's kernel keeps what it wrote.

A marker without records is an older kvtier's, or one that could not be written: all folders are
walked for it.

If other hosts sweep, they treat a marker that was not written for a day as a dead writer's. So
a writer that has been idle checks that its own marker still exists before it writes again.

# Invariant: a folder is named in the marker before an unfinished file is in it, or the marker
#            has no header. Checked: note,
#            test_the_marker_of_a_killed_writer_names_each_folder_with_an_unfinished_file.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from contextlib import suppress
from typing import Final

FOLDERS_MAX: Final = 32
"""Most folders that one record names: more than a batch has blocks."""

LOOK_PAUSE_S: Final = 3600.0
"""Pause between checks of a writer's marker: far below the day after which others remove it."""

_HEADER: Final = b"kvtier-writes-1\n"
_NAME_BYTES: Final = 24  #: length of a folder's name, padded, with its line end
_RECORD_BYTES: Final = FOLDERS_MAX * _NAME_BYTES
_RECORDS_MAX: Final = 4096
_FOLDER: Final = re.compile(r"[0-9a-f_]{3}/[0-9a-f_]{2}(_g[0-9]{1,10})?")


class _Own(threading.local):
    """One thread's record in the marker."""

    number: int | None = None  #: of its record
    noted: frozenset[str] | None = None


class Unfinished:
    """One writer's open marker. Any thread may call any method."""

    def __init__(self, descriptor: int) -> None:
        """Take over the marker, open for writing. It is closed when the last user releases this."""
        self._descriptor = descriptor
        self._numbers = itertools.count()
        self._own = _Own()
        self._is_given_up = False
        self._looked_s = time.monotonic()
        self._write(_HEADER, 0)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)

    def is_removed(self) -> bool:
        """Return whether others took this writer for dead. Checks once an hour of its own clock."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_PAUSE_S:
            return False
        self._looked_s = now_s
        try:
            return os.fstat(self._descriptor).st_nlink == 0
        except OSError:  # NFS: ESTALE
            return True

    def note(self, folders: frozenset[str]) -> None:
        """Note where this thread writes until its next note. Raises nothing.

        Repeating the last note, the very same object, costs no call.
        """
        if self._own.noted is folders:
            return
        self._own.noted = folders
        if len(folders) > FOLDERS_MAX:
            self._give_up()
        number = self._number()
        if self._is_given_up:
            return
        lines = (f"{folder:{_NAME_BYTES - 1}}\n" for folder in folders)
        record = "".join(lines).encode().ljust(_RECORD_BYTES)
        self._write(record, len(_HEADER) + number * _RECORD_BYTES)

    def _number(self) -> int:
        """Return the number of this thread's record."""
        number = self._own.number
        if number is None:
            number = self._own.number = next(self._numbers)
            if number >= _RECORDS_MAX:
                self._give_up()
        return number

    def _write(self, data: bytes, at: int) -> None:
        try:
            is_whole = os.pwrite(self._descriptor, data, at) == len(data)
        except OSError:
            is_whole = False
        if not is_whole:
            self._give_up()

    def _give_up(self) -> None:
        """Leave a marker without a header: all folders are to be walked for this writer."""
        self._is_given_up = True
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)


def folders_untrusted(raw: bytes) -> set[str] | None:
    """Return the folders that a marker names; None if it is invalid. Raises nothing."""
    if not raw.startswith(_HEADER) or (len(raw) - len(_HEADER)) % _RECORD_BYTES:
        return None
    names = raw[len(_HEADER) :].replace(b"\0", b" ").decode("ascii", "replace").split()
    return set(names) if all(map(_FOLDER.fullmatch, names)) else None


def marker_bytes_max() -> int:
    """Return the maximum number of bytes to read of a marker."""
    return len(_HEADER) + _RECORDS_MAX * _RECORD_BYTES
