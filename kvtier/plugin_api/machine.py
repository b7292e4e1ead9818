"""Measures how much memory there is for this process, and how much of it is free.

The machine's memory, or the limit of its control group and those above it, if that is less: a
container's limit, or a service's.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path("/")
"""The folder with ``proc`` and ``sys``, unless a test has its own."""


class _Files(NamedTuple):
    """File names of one version of control groups."""

    limit: str
    used: str
    cached: tuple[str, ...]  #: lines of memory.stat: pages that the kernel reclaims on demand


_V1: Final = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2: Final = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


def machine_memory_bytes(root: Path = ROOT) -> int | None:
    """Return how much memory this process could have at most; None if that is not known.

    ``root``: the folder with ``proc`` and ``sys``.
    """
    limits = [limit for limit, _, _ in _limits(root)]
    return min([*_meminfo(root, "MemTotal"), *limits], default=None)


def free_memory_bytes(root: Path = ROOT) -> int | None:
    """Return how much memory this process could take now; None if that is not known."""
    free = [_left(*limited) for limited in _limits(root)]
    return min([*_meminfo(root, "MemAvailable"), *free], default=None)


def _limits(root: Path) -> Iterator[tuple[int, Path, _Files]]:
    """Yield the limit of each control group that has one."""
    for folder, files in _groups(root):
        with suppress(OSError, ValueError):  # it is not there, or its limit is "max"
            limit = int(_text(folder / files.limit))
            if limit > 0:
                yield limit, folder, files


def _left(limit: int, folder: Path, files: _Files) -> int:
    """Return the rest of a limit: not counting pages that the group can do without."""
    try:
        used = int(_text(folder / files.used))
        lines = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
        cached = sum(int(lines[name]) for name in files.cached)
    except (OSError, ValueError, KeyError):  # another kernel's format, or just removed
        return limit
    return max(0, limit - max(0, used - cached))


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folders that may belong to this process's group, and to those above it."""
    mounts = root / "sys/fs/cgroup"
    lines = []
    with suppress(OSError, ValueError):
        lines = _text(root / "proc/self/cgroup").splitlines()
    places = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "memory":
            places.append((mounts / "memory", path, _V1))
        elif not controllers:
            places += [(mounts, path, _V2), (mounts / "unified", path, _V2)]
    for mount, path, files in places:
        below = mount / path.strip("/")
        # In a container the path may be one that only the host sees; the mount is the container's.
        for folder in (below, *below.parents):
            yield folder, files
            if folder == mount:
                break


def _meminfo(root: Path, name: str) -> list[int]:
    """Return a line of the kernel's memory count, in bytes, if there is such a line."""
    try:
        lines = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines())
        return [int(lines[name].split()[0]) * 1024]
    except (OSError, ValueError, KeyError, IndexError):
        return []


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape")
