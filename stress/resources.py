"""What this process holds of the machine: compared before the faults and after them."""

from __future__ import annotations

import gc
import os
import re
import resource
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.hosts.spawning import THREAD_NAME
from stress.runtime.processes import call_of, children

MEMORY_GROWTH_BYTES_MAX: Final = 64 << 20
"""Caches of Python and of the C library keep some; a leak of an hour is more."""

TIER_DESCRIPTORS_MORE_MAX: Final = 8
"""A tier opens its files when it first needs them, one way or the other; a leak is more."""

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - looked at, not written to


@dataclass(frozen=True)
class Resources:
    """One moment's."""

    descriptors: Counter[str]  #: what they are open for → how many
    threads: Counter[str]  #: by name
    processes: Counter[str]  #: children, by what they are called
    tier_descriptors: Counter[str]  #: tier's process → how many
    shared_memory: frozenset[str]  #: names of kvtier's in /dev/shm
    memory_bytes: int  #: resident

    def left_since(self, before: Resources, *, judges_memory: bool = True) -> dict[str, str]:
        """Return what there is more of than before, and processes that are gone: name → in words.

        Fewer threads are no leak: those of a pool may have ended since. Memory may vary, and
        says nothing unless ``judges_memory``.
        """
        found = {}
        for name in ("descriptors", "threads"):
            more = vars(self)[name] - vars(before)[name]
            if more:
                found[name] = f"more: {dict(more)}"
        if self.processes != before.processes:
            more, fewer = self.processes - before.processes, before.processes - self.processes
            found["processes"] = f"more: {dict(more)}, fewer: {dict(fewer)}"
        opened = self.tier_descriptors - before.tier_descriptors
        if any(count > TIER_DESCRIPTORS_MORE_MAX for count in opened.values()):
            found["descriptors of tiers"] = str(dict(opened))
        if self.shared_memory - before.shared_memory:
            found["shared memory"] = str(sorted(self.shared_memory - before.shared_memory))
        grown = self.memory_bytes - before.memory_bytes
        if judges_memory and grown > MEMORY_GROWTH_BYTES_MAX:
            found["memory"] = f"{grown >> 20} MiB more"
        return found


def resident_bytes() -> int:
    """Return how much memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def resources_now(kept_bytes: int = 0) -> Resources:
    """Look at this process and its children. ``kept_bytes``: memory that counts for nothing."""
    gc.collect()
    names = {pid: _name_of(pid) for pid in children()}
    return Resources(
        descriptors=descriptors_of("self"),
        threads=Counter(_without_numbers(each.name) for each in ending_threads()),
        processes=Counter(names.values()),
        tier_descriptors=Counter(
            {
                name: descriptors_of(str(pid)).total()
                for pid, name in names.items()
                if name.startswith("kvtier-")
            }
        ),
        shared_memory=frozenset(
            each.name
            for each in SHARED_MEMORY.iterdir()
            if re.search(rf"kvtier-{os.getpid()}(?!\d)", each.name)
        ),
        memory_bytes=resident_bytes() - kept_bytes,
    )


def ending_threads() -> list[threading.Thread]:
    """Return all threads but the one that lives as long as its process."""
    return [each for each in threading.enumerate() if each.name != THREAD_NAME]


def descriptors_of(pid: str) -> Counter[str]:
    """Count what a process has open, by what it is; nothing once it has ended."""
    found: Counter[str] = Counter()
    with suppress(FileNotFoundError, ProcessLookupError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # that of this look itself
                found[_without_numbers(str(each.readlink()))] += 1
    return found


def _name_of(pid: int) -> str:
    """Return what a child is for: a tier's process has the tier's name among its arguments."""
    call = [each.decode(errors="replace") for each in call_of(pid)]
    named = [each for each in call if each.startswith("kvtier-")]
    return (named or call[-1:] or ["ended"])[0]


def _without_numbers(name: str) -> str:
    """Return a name without what is counted in it: inodes, threads."""
    return "".join(each for each in name if not each.isdigit())
