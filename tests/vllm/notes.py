"""Files that processes of one test leave for each other: written whole, and waited for."""

from __future__ import annotations

import time
from pathlib import Path

NOTE_TIMEOUT_S = 240.0


def leave(path: str, text: str = "") -> None:
    """Write a note, so that nobody reads half of it."""
    unfinished = Path(f"{path}.tmp")
    unfinished.write_text(text)
    unfinished.rename(path)


def wait_for(path: str, timeout_s: float = NOTE_TIMEOUT_S) -> str:
    """Wait until the note is there; return its text."""
    note = Path(path)
    deadline_s = time.monotonic() + timeout_s
    while not note.exists():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"no {note.name} within {timeout_s} s")
        time.sleep(0.02)
    return note.read_text()
