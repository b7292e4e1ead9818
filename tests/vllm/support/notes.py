"""Files that processes of one test leave for each other: written whole, and waited for."""

from __future__ import annotations

from pathlib import Path

from tests.support.patience import until


def leave(path: str, text: str = "") -> None:
    """Write a note, so that nobody reads half of it."""
    unfinished = Path(f"{path}.tmp")
    unfinished.write_text(text)
    unfinished.rename(path)


def wait_for(path: str) -> str:
    """Wait until the note is there; return its text."""
    note = Path(path)
    until(note.exists, lambda: f"no {note.name}")
    return note.read_text()
