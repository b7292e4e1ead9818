"""Finds the engine that has claimed a folder, and the process that holds its lock.

The lock file has the engine's process id, which users know. The lock itself may be
held by another process, the tier's own, which may be stopped, or have outlived
its engine. /proc shows that, but only for processes of this user and this container.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier_backends.posix import process_stat

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK_NAME: Final = "lock"
_PARENT_FIELD: Final = 1  # of those after the command's name, see proc(5)
_STATES: Final = {
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "D": "waits for its storage",
    "Z": "has ended",
    "X": "has ended",
}


class Holder(NamedTuple):
    """The process that has the lock."""

    pid: int
    state: str  #: its state, as words after its name: "runs", "is stopped"


class User(NamedTuple):
    """The engine that has a folder claimed."""

    pid: int | None  #: the engine's, from the lock file; perhaps of its own container
    holder: Holder | None = None  #: None if it is not visible from here
    is_left_over: bool = False  #: the holder has outlived its engine
    is_of_same_program: bool = False  #: the program that made the claiming engine made this one too

    def __str__(self) -> str:
        """Return the process to end, and its state, as half a sentence."""
        engine = "another process" if self.pid is None else f"process {self.pid}"
        if self.holder is None:
            return engine
        pid, state = self.holder
        if self.is_left_over:
            return f"process {pid}, which {state} and is left of engine process {self.pid}"
        if state == "runs":
            return engine
        if pid == self.pid:
            return f"{engine}, which {state}"
        return f"{engine}, whose tier's process {pid} {state}"

    @property
    def remedy(self) -> str:
        """Return how to free the folder, as the beginning of a sentence."""
        if self.holder is None:
            return "Stop that engine"
        pid, state = self.holder
        if state == "waits for its storage":
            return f"See to the storage that process {pid} waits for"
        if self.is_left_over:
            return f"End it with 'kill -KILL {pid}'"
        if state == "runs" and self.is_of_same_program:
            return "Stop that engine, which this same program has made (in a notebook: del llm)"
        if state == "runs":
            return "Stop that engine"
        return f"Let process {pid} go on with 'kill -CONT {pid}', then stop that engine"


def user_untrusted(descriptor: int, asking: int | None = None) -> User:
    """Return the user of this open lock file, as far as it can be found. Raises nothing.

    ``asking``: the process of the engine that wants it.
    """
    try:
        text = os.pread(descriptor, 32, 0).decode("ascii").strip()
    except (OSError, ValueError):
        text = ""
    engine = int(text) if text.isdecimal() else None
    pid = next(_holders(descriptor), None)
    if pid is None:
        return User(engine)
    is_sibling = asking is not None and engine is not None and _are_siblings(engine, asking)
    is_left_over = engine is not None and _state(engine) == "has ended" and _is_of_here(pid)
    is_sibling = is_sibling and not is_left_over and _is_of_here(pid)
    return User(engine, Holder(pid, _state(pid)), is_left_over, is_sibling)


def _holders(descriptor: int) -> Iterator[int]:
    """Yield the numbers of the processes that have the lock, if visible to this user."""
    try:
        status = os.fstat(descriptor)
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            continue  # it has ended, or is another user's
        for name in names:
            try:
                # Read only the name, and the kernel's data on it: its storage may hang.
                if os.readlink(f"{folder}/{name}").endswith(f"/{LOCK_NAME}") and _has_lock(
                    f"/proc/{pid}/fdinfo/{name}", f" {device}:{status.st_ino} "
                ):
                    yield pid
            except OSError:
                continue


def _has_lock(path: str, file_name: str) -> bool:
    """Return whether the descriptor has that file's flock. Raises ``OSError``.

    On a filesystem whose numbers /proc writes differently (btrfs, overlay) it is not found:
    better to name no process than an unrelated one.
    """
    with open(path, encoding="ascii", errors="replace") as file:
        # Such as: lock:  1: FLOCK  ADVISORY  WRITE 4711 00:22:1234 0 EOF
        return any(
            line.startswith("lock:") and " FLOCK " in line and file_name in line for line in file
        )


def _is_of_here(pid: int) -> bool:
    """Return whether the process is in this process's PID namespace."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def _are_siblings(pid: int, other: int) -> bool:
    """Return whether two engines belong to one Python program: itself, or two children of it.

    Two programs of one shell do not: the shell is not Python.
    """
    if pid == other:
        return True
    try:
        parent, other_parent = (int(process_stat(each)[_PARENT_FIELD]) for each in (pid, other))
        return parent == other_parent and os.path.samefile(
            f"/proc/{parent}/exe", f"/proc/{other}/exe"
        )
    except (OSError, IndexError, ValueError):
        return False


def _state(pid: int) -> str:
    try:
        letter = process_stat(pid)[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "has ended"
    except (OSError, IndexError, ValueError):
        return "runs"
    return _STATES.get(letter, "runs")
