"""The filesystem below the mounted one runs out of room, and has room again."""

from __future__ import annotations

import errno
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from stress.filesystem.faults import FilesystemFaults
from stress.filesystem.volume import Volume
from stress.plan import Fault
from tests.support.needs import needs
from tests.support.patience import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK = bytes(100_000)

pytestmark = needs("mount")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "source"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture
def volume(place: Path) -> Iterator[Volume]:
    volume = Volume(place)
    yield volume
    volume.unmount()
    assert list(place.iterdir()) == []


def test_a_write_that_has_no_room_ends_in_its_midst(volume: Volume, place: Path) -> None:
    (place / "before").write_bytes(BLOCK)
    volume.leave(room_bytes=len(BLOCK) // 2)
    with pytest.raises(OSError, match="No space left") as refused:
        (place / "after").write_bytes(BLOCK)
    assert refused.value.errno == errno.ENOSPC
    assert 0 < (place / "after").stat().st_size < len(BLOCK)
    (place / "before").unlink()
    (place / "after").write_bytes(BLOCK)  # what was removed is enough


def test_a_folder_that_has_no_room_is_not_made(volume: Volume, place: Path) -> None:
    volume.leave(files=1)
    (place / "first").mkdir()
    with pytest.raises(OSError, match="No space left"):
        (place / "second").mkdir()
    volume.leave()
    (place / "second").mkdir()
    assert sorted(each.name for each in place.iterdir()) == ["first", "second"]


def fill(folder: Path) -> None:
    for number in range(20):
        (folder / f"{number}").write_bytes(BLOCK)


@needs("fuse")
@pytest.mark.parametrize("target", ["bytes", "files"])
def test_a_fault_counts_the_calls_that_found_no_room(target: str, place: Path) -> None:
    """A fault that hits nothing shows nothing."""
    mount = place.with_name("mounted")
    mount.mkdir()
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
