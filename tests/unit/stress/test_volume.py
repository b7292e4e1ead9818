"""The filesystem below the mounted one runs out of room, and has room again."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from stress.filesystem.faults import FilesystemFaults
from stress.plan import Fault
from tests.support.needs import needs
from tests.support.patience import until

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = bytes(100_000)


def fill(folder: Path) -> None:
    for number in range(20):
        (folder / f"{number}").write_bytes(BLOCK)


@needs("mount")
@needs("fuse")
@pytest.mark.parametrize("target", ["bytes", "files"])
def test_a_fault_counts_the_calls_that_found_no_room(target: str, tmp_path: Path) -> None:
    """A fault that hits nothing shows nothing. Afterwards there is room again."""
    place, mount = tmp_path / "source", tmp_path / "mounted"
    for each in (place, mount):
        each.mkdir(mode=0o700)
    injected: Counter[str] = Counter()
    faults = FilesystemFaults(place, mount, injected)
    try:
        until(faults.is_ready)
        fault = Fault(0.0, 1.0, "fs_no_room", target, "1:fs_no_room:0", random.Random(1))
        assert faults.begin(fault) == 0
        with pytest.raises(OSError, match="No space left"):
            fill(mount)
        faults.end(fault)
        assert injected["fs_no_room"] >= 1
        (mount / "again").write_bytes(BLOCK)
        assert (place / "again").read_bytes() == BLOCK
    finally:
        faults.unmount()
