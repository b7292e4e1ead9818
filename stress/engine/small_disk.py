"""A small filesystem for a tier's folder, which can be filled to the last byte and freed again."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stress.filesystem.volume import Volume
from stress.runtime.files import NAMESPACE_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stress.plan import Fault

FILES_MAX: Final = 1_000  #: of blocks
SWEEP_S: Final = 3.0
INSTEAD: Final = "-instead"


@contextmanager
def small_disk(place: Path) -> Iterator[Volume | None]:
    """Mount a small filesystem; None: this user may not, and it is an ordinary folder."""
    place.mkdir(mode=0o700)
    try:
        volume = Volume(place)
    except OSError:
        yield None
        return
    try:
        yield volume
    finally:
        volume.unmount()


class FullDisk:
    """Fills it, for a while. One thread."""

    def __init__(self, volume: Volume | None) -> None:
        """``None``: nothing is filled."""
        self._volume = volume
        self._filled_by: str | None = None

    def begin(self, fault: Fault) -> int:
        """Take all that is free."""
        if self._volume is None or self._filled_by is not None:
            return 0
        self._filled_by = fault.seed
        self._volume.leave(room_bytes=1)  # of 0 bytes a size is none
        return 1

    def end(self, fault: Fault) -> None:
        """Give it back."""
        if self._volume is not None and self._filled_by == fault.seed:
            self._filled_by = None
            self._volume.leave()


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
