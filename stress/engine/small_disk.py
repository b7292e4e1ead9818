"""A small filesystem for a tier's folder, which can be filled to the last byte and freed again."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stress.runtime.files import NAMESPACE_FILE
from stress.supervisor import mount_source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stress.plan import Fault

DISK_BYTES: Final = 256 << 20
FILES_MAX: Final = 1_000  #: of blocks: a third of the disk
SWEEP_S: Final = 3.0
INSTEAD: Final = "-instead"
BALLAST: Final = "ballast"


@contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """Mount a small filesystem; False: this user may not, and it is an ordinary folder."""
    place.mkdir(mode=0o700)
    mount = shutil.which("mount")
    is_mounted = (
        mount is not None
        and not subprocess.run(
            [
                mount,
                "-t",
                "tmpfs",
                "-o",
                f"size={DISK_BYTES},mode=0700",
                mount_source(os.getpid()),
                str(place),
            ],
            stderr=subprocess.DEVNULL,
            check=False,
        ).returncode
    )
    try:
        yield is_mounted
    finally:
        if is_mounted:
            umount = shutil.which("umount") or "umount"
            subprocess.run([umount, "--lazy", str(place)], check=False)


class FullDisk:
    """Fills it, for a while. One thread."""

    def __init__(self, place: Path, *, is_small: bool) -> None:
        """``is_small``: it is a filesystem of its own. Else nothing is filled."""
        self._ballast = place / BALLAST
        self._is_small = is_small
        self._filled_by: str | None = None

    def begin(self, fault: Fault) -> int:
        """Take all that is free."""
        if not self._is_small or self._filled_by is not None:
            return 0
        self._filled_by = fault.seed
        with self._ballast.open("wb") as file:
            step = 1 << 20
            while step >= 4096:
                at = os.fstat(file.fileno()).st_size
                try:
                    os.posix_fallocate(file.fileno(), at, step)
                except OSError:
                    step >>= 1
        return 1

    def end(self, fault: Fault) -> None:
        """Give it back."""
        if self._filled_by == fault.seed:
            self._filled_by = None
            self._ballast.unlink()


@dataclass
class Sweeper:
    """Bounds an ``fs`` tier's folder from outside, as its how-to says, and counts its blocks."""

    folder: Path
    asides: tuple[Path, ...]  #: where faults move folders; what nobody puts back is removed
    blocks: int = 0

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.to_thread(self.sweep)
            await asyncio.sleep(SWEEP_S)

    def sweep(self) -> None:
        """Remove the oldest blocks beyond ``FILES_MAX``, and what lies aside for good."""
        found: list[tuple[float, str]] = []
        for place, _, names in os.walk(self.folder):
            for name in names:
                path = f"{place}/{name}"
                with suppress(OSError):  # the tier, or a fault, was quicker
                    if name != NAMESPACE_FILE:
                        found.append((os.lstat(path).st_mtime, path))
        found.sort()
        for _, path in found[:-FILES_MAX]:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - a thousand at once
        self.blocks = min(len(found), FILES_MAX)
        for aside in self.asides:
            for left in aside.glob(f"*{INSTEAD}"):
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)
