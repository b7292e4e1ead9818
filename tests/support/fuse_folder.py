"""A folder whose storage hangs or fails when a test says so: a FUSE filesystem, as soaks have it.

Whatever a test does, or doesn't, the filesystem is gone afterwards. The process that runs the
tests must not look into the folder while it hangs: it could not be ended; look at ``source``,
which is an ordinary folder.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stress.filesystem import fuse_folder as soaked
from tests.support.patience import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class FuseFolder(soaked.FuseFolder):
    """One that tests wait for, with their patience.

    A test whose own thread hangs in it, by a fault of the product, can't be interrupted: no
    timeout would ever end it. So what still hangs after twice that time fails.
    """

    def __init__(self, source: Path, path: Path) -> None:
        super().__init__(source, path)
        self._end = threading.Timer(2 * PATIENCE_S, self._server.kill)
        self._end.daemon = True
        self._end.start()

    def vanish(self) -> None:
        """Be gone."""
        self._end.cancel()
        super().vanish()

    def wait_until_something_hangs(self) -> None:
        """Return once a call hangs."""
        until(lambda: self.waiting, lambda: "nothing has called")

    def wait_until_mounted(self) -> None:
        """Return once calls come through."""
        until(self.is_mounted, lambda: "the filesystem is not there")


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
