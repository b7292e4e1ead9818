"""What the tests of backends that keep files share: keys, small disks, and processes to kill."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.plugin_api.backend import block_digest

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[3]


def key_of(number: int, group: int = 0) -> bytes:
    """Return a block's key as vLLM makes them: a hash of 32 bytes, and the group."""
    return block_digest(b"", memoryview(str(number).encode())) * 2 + group.to_bytes(4, "big")


@contextmanager
def tmpfs(folder: Path, size: str, *, inodes: int = 0) -> Iterator[Path]:
    """Make ``folder`` a filesystem of this size until the end of the block. Root only.

    ``inodes``: so many files and folders it takes; 0: as many as fit.
    """
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes},mode=700", "tmpfs", folder)
    try:
        yield folder
    finally:
        unmount(folder)


def fill_with_files(folder: Path) -> None:
    """Use up all inodes."""
    with suppress(OSError):
        for number in itertools.count():
            (folder / f"filler-{number}").touch()


def mount(*arguments: str | Path) -> None:
    """Run ``mount``."""
    subprocess.run(["mount", *arguments], check=True)


def unmount(folder: Path) -> None:
    """Take the filesystem away from ``folder``, even while files on it are open."""
    subprocess.run(["umount", "-l", folder], check=True)


def start_python(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Start a Python that can import the tests; ``options`` are those of ``Popen``."""
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "backends"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **options)


def open_files() -> list[int]:
    """Return the descriptors that this process has open."""
    return [int(each.name) for each in Path("/proc/self/fd").iterdir()]


def open_on(device: int) -> list[str]:
    """Return what this process has open on a filesystem: paths do not tell once it is unmounted."""
    found = []
    for number in open_files():
        with suppress(OSError):  # the listing's own is closed by now
            if os.fstat(number).st_dev == device:
                found.append(str(Path(f"/proc/self/fd/{number}").readlink()))
    return found


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open so many files more, and then none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = max(open_files()) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    taken = []
    with suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)
