"""Faults of the tiers' processes: killed, stopped, short of descriptors or of memory."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stress.plan import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stress.plan import Fault

MEMORY_LEFT_BYTES: Final = 1 << 20
_LIMITS: Final = {"few_descriptors": resource.RLIMIT_NOFILE, "little_memory": resource.RLIMIT_AS}
_GONE: Final = (ProcessLookupError, FileNotFoundError)


def kinds(tiers: Sequence[str]) -> tuple[Kind, ...]:
    """Return the kinds of faults, for these tiers."""
    targets = tuple(tiers)
    return (
        Kind("kill", targets, per_minute=6),
        Kind("stop", targets, per_minute=8, spell_s=(0.1, 3.0)),
        Kind("few_descriptors", targets, per_minute=6, spell_s=(0.1, 3.0)),
        Kind("little_memory", targets, per_minute=3, spell_s=(0.1, 3.0)),
    )


class ProcessFaults:
    """Does them, and takes them back. One thread.

    ``find``: names the processes of a tier that there are just now.
    """

    def __init__(self, find: Callable[[str], Sequence[int]] | None = None) -> None:
        self._find = find or tier_processes
        self._stopped: dict[str, list[int]] = {}  # fault → processes
        self._restore: dict[str, tuple[int, int, tuple[int, int]]] = {}  # fault → pid, limit, usual

    def begin(self, fault: Fault) -> int:
        """Do a fault; returns to how many processes: a tier has none while it is restarted."""
        pids = self._find(fault.target)
        return sum(self._begin_one(fault, pid) for pid in pids)

    def _begin_one(self, fault: Fault, pid: int) -> bool:
        with suppress(*_GONE):
            if fault.kind == "kill":
                os.kill(pid, signal.SIGKILL)
            elif fault.kind == "stop":
                os.kill(pid, signal.SIGSTOP)
                self._stopped.setdefault(fault.seed, []).append(pid)
            elif not _has_started(pid):
                return False
            else:
                limit = _LIMITS[fault.kind]
                _, most = resource.getrlimit(limit)  # tiers' processes take what they may
                resource.prlimit(pid, limit, (_little(pid, limit), most))
                self._restore[fault.seed] = (pid, limit, (most, most))
            return True
        return False

    def end(self, fault: Fault) -> None:
        """Take a fault back from whatever processes there are now."""
        with suppress(*_GONE):
            if fault.kind == "stop":
                for pid in self._stopped.pop(fault.seed, []):
                    os.kill(pid, signal.SIGCONT)
            elif fault.seed in self._restore:
                resource.prlimit(*self._restore.pop(fault.seed))


def _has_started(pid: int) -> bool:
    """Tell whether a tier's process serves: it watches its engine then.

    One that runs out of something before ends, and says so on the standard error stream, where
    nothing else may be said.
    """
    folder = f"/proc/{pid}/fd"
    for each in os.listdir(folder):  # noqa: PTH208 - names are all that is wanted
        with suppress(FileNotFoundError):
            if "pidfd" in os.readlink(f"{folder}/{each}"):  # noqa: PTH115 - no path
                return True
    return False


def _little(pid: int, limit: int) -> int:
    """Return a limit that leaves the process next to nothing more than it has."""
    if limit == resource.RLIMIT_NOFILE:
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - a count is all that is wanted
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize() + MEMORY_LEFT_BYTES


def tier_processes(tier: str, among: Sequence[int] | None = None) -> list[int]:
    """Return the processes of a tier, by the names in their call: among these, or the children."""
    name = f"kvtier-{tier}".encode()
    return [pid for pid in (children() if among is None else among) if name in call_of(pid)]


def children() -> list[int]:
    """Return all children of this process that have not ended."""
    return [pid for pid, parent, _ in living() if parent == os.getpid()]


def living() -> Iterator[tuple[int, int, int]]:
    """Yield all processes that have not ended, reaped or not: number, parent and session."""
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with suppress(*_GONE):
                text = (each / "stat").read_text().rpartition(")")[2]
                state, parent, _, session = text.split()[:4]
                if state not in "ZX":
                    yield int(each.name), int(parent), int(session)


def call_of(pid: int) -> list[bytes]:
    """Return the arguments a process was called with; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except _GONE:
        return []
