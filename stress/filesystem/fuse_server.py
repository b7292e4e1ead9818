"""A filesystem that hands every call on to another folder, or hangs, or fails, as it is told.

``fuse_folder.py`` starts it as ``python -m stress.filesystem.fuse_server SOURCE MOUNT``. It is
told what to do in lines of JSON on its standard input, and answers each with one. When that
or the process that started it ends, it is gone at once, its mount too, and all calls that hang
fail: nobody is left to let them go on.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any, Final, NamedTuple

import mfusepy

from stress.supervisor import mount_source

HANG_S_MAX: Final = 240.0
"""So long a call hangs at most, whatever the test does: less than a test may take."""

NEED_ROOM: Final = frozenset({"create", "fallocate", "mkdir", "symlink", "link", "write"})

GATED: Final = (
    "chmod",
    "chown",
    "create",
    "fallocate",
    "fsync",
    "getattr",
    "link",
    "mkdir",
    "open",
    "read",
    "readdir",
    "readlink",
    "rename",
    "rmdir",
    "statfs",
    "symlink",
    "truncate",
    "unlink",
    "utimens",
    "write",
)
"""What waits at the gate before it is done, by libfuse's names: all but ``release``."""


class Wrong(NamedTuple):
    """One thing that is wrong with some calls, until it is ended."""

    kind: str  #: hang, fail, delay, full, lie, tear, short, compress or open_to_all
    calls: frozenset[str]  #: by libfuse's names; ``*``: all
    error: int = 0  #: fail, full: the errno
    seconds: float = 0.0  #: delay: how long
    every: int = 1  #: only every so-manieth of these calls


class Gate:
    """What becomes of the calls. Any thread. A call that nothing is wrong with takes no lock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wrongs: dict[str, Wrong] = {}  # by the name that it was begun with
        self._of: dict[str, tuple[Wrong, ...]] = {}  # by call, made from these when it first comes
        self._waiting = 0
        self._calls = 0  # about: counted without the lock
        self._done: Counter[str] = Counter()  # kind → calls that it was done to

    def let_through(self, call: str) -> None:
        """Wait while such calls are to hang, or to be late; raise what they are to fail with."""
        self._calls += 1
        if not self._wrong_with(call):
            return
        with self._changed:
            if self._hit("hang", call):
                self._waiting += 1
                self._changed.wait_for(lambda: not self._find("hang", call), HANG_S_MAX)
                self._waiting -= 1
            late = self._hit("delay", call)
            fails = self._hit("fail", call)
            full = self._hit("full", call) if call in NEED_ROOM else None
        if late:
            time.sleep(late.seconds)
        if fails:
            raise mfusepy.FuseOSError(fails.error)
        if full:
            raise mfusepy.FuseOSError(full.error)

    def count(self, kind: str) -> None:
        """Count what went wrong with a call by itself."""
        with self._changed:
            self._done[kind] += 1

    def does(self, kind: str, call: str) -> bool:
        """Tell whether a read or write is to lie, to be torn or to come short."""
        if not self._wrong_with(call):
            return False
        with self._changed:
            return self._hit(kind, call) is not None

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Change what becomes of calls from now on; returns what came, hangs, and was done."""
        with self._changed:
            if order.get("heal"):
                self._wrongs.clear()
            if "end" in order:
                self._wrongs.pop(order["end"], None)
            if "begin" in order:
                wrong = Wrong(**{**order["wrong"], "calls": frozenset(order["wrong"]["calls"])})
                self._wrongs[order["begin"]] = wrong
            self._of = {}
            self._changed.notify_all()
            return {"calls": self._calls, "waiting": self._waiting, "done": dict(self._done)}

    def _wrong_with(self, call: str) -> tuple[Wrong, ...]:
        """Return all that is wrong with such calls now."""
        found = self._of.get(call)
        if found is None:
            with self._changed:
                wrongs = self._wrongs.values()
                found = tuple(each for each in wrongs if not each.calls.isdisjoint(("*", call)))
                self._of[call] = found
        return found

    def _find(self, kind: str, call: str) -> Wrong | None:
        for wrong in self._wrong_with(call):
            if wrong.kind == kind:
                return wrong
        return None

    def _hit(self, kind: str, call: str) -> Wrong | None:
        """Return what is wrong with this call, and count it."""
        for wrong in self._wrong_with(call):
            if wrong.kind == kind and self._calls % wrong.every == 0:
                self._done[kind] += 1
                return wrong
        return None


class Passthrough(mfusepy.Operations):  # type: ignore[misc] # it has no types
    """Every call, done on the source folder after the gate let it through."""

    use_ns = True

    def __init__(self, source: str, gate: Gate) -> None:
        self._source = source
        self._gate = gate
        for name in GATED:
            setattr(self, name, self._gated(name, getattr(self, name)))

    def _gated(self, name: str, call: Any) -> Any:
        let_through = self._gate.let_through

        @functools.wraps(call)
        def gated(*arguments: Any) -> Any:
            let_through(name)
            try:
                return call(*arguments)
            except OSError as problem:
                if problem.errno == errno.ENOSPC:  # the source folder's own
                    self._gate.count("no_room")
                raise

        return gated

    def _at(self, path: str) -> str:
        return self._source + path

    def init_with_config(self, _connection: Any, config: Any) -> None:
        """Have the kernel remember nothing, so that every call comes here."""
        for timeout in ("entry_timeout", "negative_timeout", "attr_timeout"):
            setattr(config, timeout, 0.0)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._at(path)) if fh is None else os.fstat(fh)
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_blocks")
        times = {f"st_{name}time": getattr(found, f"st_{name}time_ns") for name in "amc"}
        told = {**{name: getattr(found, name) for name in names}, **times}
        if self._gate.does("open_to_all", "getattr"):  # as SMB and gcsfuse tell of any file
            told["st_mode"] |= 0o777
        if self._gate.does("compress", "getattr"):  # files take no room that is told of
            told["st_blocks"] = 0
        return told

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree")
        return {name: getattr(found, name) for name in (*names, "f_favail", "f_namemax")}

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._at(old), self._at(new))
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._at(source), self._at(target))
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._at(target))
        return 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.chown(self._at(path), uid, gid, follow_symlinks=False)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        if times is None:
            os.utime(self._at(path), follow_symlinks=False)
        else:
            os.utime(self._at(path), ns=times, follow_symlinks=False)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path) if fh is None else fh, length)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, length: int, fh: int) -> int:
        if mode:
            raise mfusepy.FuseOSError(errno.EOPNOTSUPP)
        os.posix_fallocate(fh, offset, length)
        return 0

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags & ~os.O_DIRECT)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        data = os.pread(fh, size, offset)
        if data and self._gate.does("lie", "read"):
            at = len(data) // 2
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        if self._gate.does("short", "read"):
            return data[: len(data) // 2]
        return data

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        if self._gate.does("tear", "write"):  # and says that it was whole
            os.pwrite(fh, data[: len(data) // 2], offset)
            return len(data)
        if self._gate.does("short", "write"):
            return os.pwrite(fh, data[: len(data) // 2], offset)
        return os.pwrite(fh, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        """Close, whatever is wrong: a descriptor is not to be lost to a call that fails."""
        try:
            self._gate.let_through("release")
        finally:
            os.close(fh)
        return 0


def _obey_standard_input(gate: Gate, mount: str) -> None:
    for line in sys.stdin:
        print(json.dumps(gate.obey(json.loads(line))), flush=True)
    _end(mount)


def _end_with(parent_pid: int, mount: str) -> None:
    """End when another process does: one that hangs in a call here may hold the pipe open."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(parent_pid)], [], [])
    _end(mount)


def _end(mount: str) -> None:
    # Detached first: afterwards the kernel answers what still hangs with an error.
    subprocess.run(["fusermount3", "-uz", mount], check=False, capture_output=True)
    os._exit(0)


def main(source: str, mount: str) -> None:
    """Serve until standard input ends."""
    gate = Gate()
    for ends, given in ((_obey_standard_input, gate), (_end_with, os.getppid())):
        threading.Thread(target=ends, args=(given, mount), daemon=True).start()
    # A call that hangs keeps its thread: enough of them that others still come through.
    mfusepy.FUSE(
        Passthrough(source, gate),
        mount,
        foreground=True,
        fsname=mount_source(os.getppid()),
        direct_io=True,
        default_permissions=True,
        max_threads=64,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
