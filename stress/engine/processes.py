"""The processes of a server: which there are, and what each of them holds."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stress.resources import (
    MEMORY_GROWTH_BYTES_MAX,
    SHARED_MEMORY,
    TIER_DESCRIPTORS_MORE_MAX,
    descriptors_of,
)
from stress.runtime.processes import call_of, living

if TYPE_CHECKING:
    from collections import Counter

THREADS_MORE_MAX: Final = 4
"""Pools grow with the first busy hour, one thread at a time; a leak is more."""

_GONE: Final = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True)
class Held:
    """What one process holds."""

    threads: int
    descriptors: Counter[str]  #: what they are open for → how many
    memory_bytes: int  #: resident, and its own


@dataclass(frozen=True)
class ServerResources:
    """One moment's, of all processes of a server."""

    processes: dict[str, Held]  #: by what they are for
    shared_memory: frozenset[str]  #: names of this run's in /dev/shm

    def left_since(self, before: ServerResources, *, judges_memory: bool) -> dict[str, str]:
        """Return what there is more of than before, or other processes: name → in words.

        Memory says nothing unless ``judges_memory``.
        """
        found = {}
        was, now = set(before.processes), set(self.processes)
        if was != now:
            found["processes"] = f"more: {sorted(now - was)}, fewer: {sorted(was - now)}"
        for name in sorted(was & now):
            more = _more(before.processes[name], self.processes[name], judges_memory=judges_memory)
            found |= {f"{what} of {name}": text for what, text in more.items()}
        if self.shared_memory != before.shared_memory:
            found["shared memory"] = str(sorted(self.shared_memory ^ before.shared_memory))
        return found


def _more(before: Held, now: Held, *, judges_memory: bool) -> dict[str, str]:
    found = {}
    if now.threads - before.threads > THREADS_MORE_MAX:
        found["threads"] = f"{now.threads}, were {before.threads}"
    opened = now.descriptors - before.descriptors
    if opened.total() > TIER_DESCRIPTORS_MORE_MAX:
        found["descriptors"] = f"more: {dict(opened)}"
    grown = now.memory_bytes - before.memory_bytes
    if judges_memory and grown > MEMORY_GROWTH_BYTES_MAX:
        found["memory"] = f"{grown >> 20} MiB more"
    return found


def resources_of(session: int, marked: str) -> ServerResources:
    """Look at the processes of a session, and at names with ``marked`` in shared memory."""
    processes: dict[str, Held] = {}
    for pid in processes_of(session):
        with suppress(*_GONE):
            processes.setdefault(_numbered(role_of(pid), processes), _held_by(pid))
    return ServerResources(processes, frozenset(names_in_shared_memory(marked)))


def names_in_shared_memory(marked: str) -> list[str]:
    """Return the names of files in ``/dev/shm`` that have ``marked`` in them."""
    return sorted(name for name in os.listdir(SHARED_MEMORY) if marked in name)  # noqa: PTH208


def processes_of(session: int) -> list[int]:
    """Return all processes of a session that have not ended, whoever their parent is by now."""
    return [pid for pid, _, own in living() if own == session]


def role_of(pid: int) -> str:
    """Return what a process is for: a tier's has the tier's name among its arguments."""
    call = [each.decode(errors="replace") for each in call_of(pid)]
    named = [each for each in call if each.startswith("kvtier-")]
    if named:
        return named[0]
    if any("resource_tracker" in each for each in call):
        return "resource_tracker"
    return Path(f"/proc/{pid}/comm").read_text().strip()


def roles_in(session: int) -> list[str]:
    """Return what the processes of a session are for."""
    roles = []
    for pid in processes_of(session):
        with suppress(*_GONE):  # it has just ended
            roles.append(role_of(pid))
    return roles


def _numbered(name: str, taken: dict[str, Held]) -> str:
    same = sum(each.partition(" #")[0] == name for each in taken)
    return f"{name} #{same + 1}" if same else name


def _held_by(pid: int) -> Held:
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    return Held(
        threads=int(status["Threads"]),
        descriptors=descriptors_of(str(pid)),
        memory_bytes=int(status["RssAnon"].split()[0]) << 10,
    )
