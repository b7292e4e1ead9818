"""What the kernel says of processes that a test has not started itself."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int) -> bool:
    """Tell whether a process that isn't ours runs: it may have ended, and nobody waits for it."""
    return state_of(pid) not in ("", "Z")


def state_of(pid: int) -> str:
    """Return the process's state in one letter, none if there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return status.rpartition(")")[2].split()[0]
