"""A folder whose storage misbehaves when it is told to: a FUSE filesystem over another folder.

However its owner ends, the filesystem is gone afterwards: its server is killed, which has the
kernel fail every call that still hangs, and the mount is detached. A call hangs for some
minutes at most. The process that tells it must not look into the folder while it hangs: it
could not be ended; look at ``source``, which is an ordinary folder.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from ctypes.util import find_library
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).parents[2]
LIBC: Final = ctypes.CDLL(None, use_errno=True)
MS_BIND: Final = 4096  # sys/mount.h, as the next one
MNT_DETACH: Final = 2
CLEAN_UP_S: Final = 30.0
"""What takes longer is left behind: nothing may keep anybody from an end."""


def why_no_fuse() -> str:
    """Return what to do so that FUSE can be used here; empty if it can."""
    if shutil.which("fusermount3") is None or find_library("fuse3") is None:
        return "apt-get install fuse3, as root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as refused:
        return f"run as root, where there is /dev/fuse (it can't be opened: {refused.strerror})"
    return ""


class FuseFolder:
    """A mounted folder. Of its calls all pass, until it is told otherwise. Any thread."""

    def __init__(self, source: Path, path: Path) -> None:
        self.source = source  #: where everything really is
        self.path = path  #: where it is mounted
        self._device_before = path.parent.stat().st_dev
        self._telling = threading.Lock()
        environment = {
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
            "FUSE_LIBRARY_NAME": "fuse3",  # mfusepy prefers libfuse 2, which knows other options
        }
        self._server = subprocess.Popen(
            [sys.executable, "-m", "stress.filesystem.fuse_server", source, path],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def is_mounted(self) -> bool:
        """Tell whether calls come through: the device's number changes when they do.

        Asks the filesystem: before anything hangs. Raises ``RuntimeError`` if its server ended.
        """
        if self._server.poll() is not None:
            raise RuntimeError("the filesystem's server ended")
        return self.path.stat().st_dev != self._device_before

    def begin(self, name: str, kind: str, *calls: str, **how: float) -> None:
        """Have something go wrong with these calls (``Wrong`` of the server), until its ``end``."""
        self._tell(begin=name, wrong={"kind": kind, "calls": calls or ("*",), **how})

    def end(self, name: str) -> dict[str, int]:
        """End what was begun by this name. Calls that hang for it go on. Returns as ``done``."""
        done: dict[str, int] = self._tell(end=name)["done"]
        return done

    def hang(self, *calls: str) -> None:
        """Have these calls hang, by libfuse's names (``getattr``, ``write`` ...); or all."""
        self.begin("hang", "hang", *calls)

    def fail(self, *calls: str, error: int = errno.EIO) -> None:
        """Have these calls fail, or all."""
        self.begin("fail", "fail", *calls, error=error)

    def heal(self) -> None:
        """Have all calls pass; those that hang go on."""
        self._tell(heal=True)

    @property
    def waiting(self) -> int:
        """How many calls hang now."""
        waiting: int = self._tell()["waiting"]
        return waiting

    def done(self) -> dict[str, int]:
        """Return to how many calls something was done so far, by kind."""
        done: dict[str, int] = self._tell()["done"]
        return done

    def vanish(self) -> None:
        """Kill the server and detach the folder, as when a network filesystem is unmounted."""
        self._server.kill()
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(CLEAN_UP_S)
        for command in (["fusermount3", "-uz"], ["umount", "-l"]):
            if not _is_mounted(self.path):
                break
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    [*command, self.path], check=False, capture_output=True, timeout=CLEAN_UP_S
                )
        for pipe in (self._server.stdin, self._server.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _tell(self, **order: object) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with self._telling:
            self._server.stdin.write(json.dumps(order) + "\n")
            self._server.stdin.flush()
            answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer


def hold(mount: Path, elsewhere: Path) -> None:
    """Have a filesystem's device number stay in use when it is unmounted: the next has another.

    It is mounted a second time, in place of what was held before. Asks the filesystem nothing.
    """
    release(elsewhere)
    if LIBC.mount(bytes(mount), bytes(elsewhere), None, MS_BIND, None):
        raise OSError(ctypes.get_errno(), "cannot be mounted a second time", str(mount))


def release(elsewhere: Path) -> None:
    """Unmount what was held, if there is something."""
    LIBC.umount2(bytes(elsewhere), MNT_DETACH)


def _is_mounted(path: Path) -> bool:
    """Tell without a call that could hang."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return any(line.split(" ")[1] == str(path) for line in lines)
