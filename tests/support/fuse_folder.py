"""A folder whose storage hangs or fails when a test says so: a FUSE filesystem.

Whatever a test does, or doesn't, the filesystem is gone afterwards: its server is killed, which
has the kernel fail every call that still hangs, and the mount is detached. A call hangs for some
minutes at most. The process that runs the tests must not look into the folder while it
hangs: it could not be ended; look at ``source``, which is an ordinary folder.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from ctypes.util import find_library
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.patience import until

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]
CLEAN_UP_S = 30.0
"""What takes longer is left behind: nothing may keep a test from its end."""


def _why_not() -> str:
    """Return what FUSE lacks here, as a skip's reason; the words say whether CI allows it."""
    if not Path("/dev/fuse").exists():
        return "needs /dev/fuse, which this machine lacks"
    if shutil.which("fusermount3") is None or find_library("fuse3") is None:
        user = "" if os.geteuid() == 0 else ", which needs root"
        return f"FUSE is not installed: apt-get install fuse3{user}"
    return ""


needs_fuse = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "FUSE is here")


class FuseFolder:
    """A mounted folder. Of its calls all pass, until it is told otherwise."""

    def __init__(self, source: Path, path: Path) -> None:
        self.source = source  #: where everything really is
        self.path = path  #: where it is mounted
        self._telling = threading.Lock()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fuse_server", source, path],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hang(self, *calls: str) -> None:
        """Have these calls hang, by libfuse's names (``getattr``, ``write`` ...); or all."""
        self._tell(hang=calls or ("*",))

    def fail(self, *calls: str, error: int = errno.EIO) -> None:
        """Have these calls fail, or all."""
        self._tell(fail=calls or ("*",), errno=error)

    def heal(self) -> None:
        """Have all calls pass; those that hang go on."""
        self._tell(hang=(), fail=(), errno=0)

    @property
    def waiting(self) -> int:
        """How many calls hang now."""
        return self._tell()["waiting"]

    def wait_until_something_hangs(self) -> None:
        """Return once a call hangs."""
        until(lambda: self.waiting, lambda: "nothing has called")

    def wait_until_mounted(self) -> None:
        """Return once calls come through; the device's number changes when they do."""
        before = self.path.parent.stat().st_dev
        until(lambda: self._server.poll() is not None or self.path.stat().st_dev != before)
        assert self._server.poll() is None, "the filesystem's server ended"

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

    def _tell(self, **order: Any) -> dict[str, int]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with self._telling:
            self._server.stdin.write(json.dumps(order) + "\n")
            self._server.stdin.flush()
            answer: dict[str, int] = json.loads(self._server.stdout.readline())
        return answer


def _is_mounted(path: Path) -> bool:
    """Tell without a call that could hang."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return any(line.split(" ")[1] == str(path) for line in lines)


@contextmanager
def fuse_folder(parent: Path) -> Iterator[FuseFolder]:
    """Mount a folder below ``parent`` until the end of the block."""
    source, path = parent / "source", parent / "mounted"
    source.mkdir(mode=0o700)
    path.mkdir(mode=0o700)
    folder = FuseFolder(source, path)
    try:
        folder.wait_until_mounted()
        yield folder
    finally:
        folder.vanish()
