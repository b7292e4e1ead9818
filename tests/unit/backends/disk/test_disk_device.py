from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from typing import TYPE_CHECKING

import anyio
import pytest

from kvtier_backends.disk import device as device_module
from kvtier_backends.disk.device import (
    PAGES_BYTES_MAX,
    FileDevice,
    Segments,
    Transfer,
    trim_segments,
)
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S, until_true
from tests.unit.backends._media import tmpfs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio
REGION_BYTES = 64 * 1024
PAGE = 4096


def pages(*fills: int) -> list[memoryview]:
    """Return page-aligned buffers, one page for each fill."""
    whole = memoryview(mmap.mmap(-1, max(1, len(fills)) * PAGE))
    for number, fill in enumerate(fills):
        whole[number * PAGE : (number + 1) * PAGE] = bytes([fill]) * PAGE
    return [whole[number * PAGE : (number + 1) * PAGE] for number in range(len(fills))]


class Said(list[OSError]):
    pass


def make(folder: Path, said: Said | None = None, *, direct: bool = True) -> FileDevice:
    return FileDevice(
        Segments(str(folder), REGION_BYTES, 2),
        direct=direct,
        read_threads=2,
        write_threads=2,
        name="t",
        on_direct_refused=(Said() if said is None else said).append,
        on_not_reserved=(Said() if said is None else said).append,
    )


@pytest.fixture
def device(tmp_path: Path) -> Iterator[FileDevice]:
    made = make(tmp_path)
    yield made
    made.close()


async def test_pages_do_not_wait_for_the_data_of_others(
    device: FileDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header waited for all batches in front of it, and all stores waited for the header."""
    await device.allocate(0)
    held, write = threading.Event(), os.pwritev
    large = memoryview(mmap.mmap(-1, 2 * PAGES_BYTES_MAX))

    def holding(descriptor: int, buffers: list[memoryview], at: int) -> int:
        if sum(each.nbytes for each in buffers) > PAGES_BYTES_MAX:
            held.wait(PATIENCE_S)
        return write(descriptor, buffers, at)

    monkeypatch.setattr(os, "pwritev", holding)
    async with anyio.create_task_group() as tasks:
        for _ in range(4):  # more than there are threads
            tasks.start_soon(device.write, [Transfer(0, 0, [large])])
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(PATIENCE_S):
            assert await device.write([Transfer(1, 0, pages(1))]) is None
        assert device.busy() == 4
        held.set()


async def test_files_belong_to_this_user_alone_and_are_as_long_as_what_is_used(
    device: FileDevice, tmp_path: Path
) -> None:
    await device.allocate(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["segment-00001.kv"]
    (path,) = tmp_path.iterdir()
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == REGION_BYTES
    assert status.st_blocks * 512 >= REGION_BYTES


async def test_missing_bytes_are_a_short_read_and_no_error(
    device: FileDevice, tmp_path: Path
) -> None:
    assert await device.read([Transfer(0, 0, pages(0))]) == [0]
    await device.allocate(0)
    os.truncate(tmp_path / "segment-00000.kv", 2 * PAGE)
    assert await device.read([Transfer(0, PAGE, pages(0, 0))]) == [PAGE]
    assert await device.read([Transfer(0, 4 * PAGE, pages(0))]) == [0]


async def test_what_was_read_is_reported_by_the_thread_that_read_it(
    device: FileDevice, tmp_path: Path
) -> None:
    """While the bytes are in its processor's cache; of a transfer that failed there are none."""
    await device.allocate(0)
    assert await device.write([Transfer(0, 0, pages(1, 2))]) is None
    (tmp_path / "segment-00001.kv").mkdir()
    back, reported = pages(0, 0), []

    def on_read(size: int) -> None:
        reported.append((size, back[1][0], threading.current_thread().name))

    failing = Transfer(2, 0, pages(0), on_read)
    missing = Transfer(4, 0, pages(0))
    await device.read([failing, missing, Transfer(0, 0, back, on_read)])
    ((size, byte, thread),) = reported
    assert (size, byte) == (2 * PAGE, 2)
    assert thread.startswith("t-read")


async def test_a_transfer_that_fails_ends_a_write_and_takes_nothing_from_other_reads(
    device: FileDevice, tmp_path: Path
) -> None:
    await device.allocate(0)
    (tmp_path / "segment-00001.kv").mkdir()
    problem = await device.write(
        [Transfer(0, 0, pages(1)), Transfer(2, 0, pages(2)), Transfer(0, 0, pages(3))]
    )
    assert problem is not None
    assert problem.errno == errno.EISDIR
    back = pages(0)
    ends = await device.read([Transfer(2, 0, pages(0)), Transfer(0, 0, back)])
    assert isinstance(ends[0], OSError)
    assert ends[1] == PAGE
    assert back[0][0] == 1


async def test_buffers_that_o_direct_refuses_go_through_the_page_cache(tmp_path: Path) -> None:
    said = Said()
    device = make(tmp_path, said)
    await device.allocate(0)
    crooked = memoryview(bytearray(b"x" * (PAGE + 1)))[1:]
    assert await device.write([Transfer(0, 0, [crooked])]) is None
    back = memoryview(bytearray(PAGE + 3))[3:]
    assert await device.read([Transfer(0, 0, [back])]) == [PAGE]
    assert back == crooked
    straight = pages(0)
    assert await device.read([Transfer(0, 0, straight)]) == [PAGE]
    assert straight[0] == crooked
    device.close()


async def test_a_filesystem_without_o_direct_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            asked.append(flags)
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    said = Said()
    device = make(tmp_path, said)
    await device.allocate(0)
    for _ in range(3):
        assert await device.write([Transfer(0, 0, pages(1))]) is None
    assert len(asked) == len(said) == 1
    device.close()


async def test_a_transfer_of_more_buffers_than_the_kernel_takes_is_cut(
    device: FileDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "_BUFFERS_MAX", 2)
    await device.allocate(0)
    assert await device.write([Transfer(0, 0, pages(1, 2, 3, 4, 5))]) is None
    back = pages(0, 0, 0, 0, 0)
    assert await device.read([Transfer(0, 0, back)]) == [5 * PAGE]
    assert [page[0] for page in back] == [1, 2, 3, 4, 5]


def test_a_transfer_that_stops_short_goes_on_where_it_stopped() -> None:
    taken = bytearray()

    def call(_: int, buffers: list[memoryview], at: int) -> int:
        assert at == 100 + len(taken)
        piece = b"".join(buffers)[:3]
        taken.extend(piece)
        return len(piece)

    buffers = [memoryview(b"abcd"), memoryview(b"ef"), memoryview(b"ghij")]
    assert device_module._move_all(call, 0, Transfer(0, 0, buffers), 100) == 10
    assert taken == b"abcdefghij"


@needs("mount")
async def test_a_full_disk_says_so_when_a_region_is_allocated(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "96k") as small:
        device = make(small)
        await device.allocate(0)
        with pytest.raises(OSError, match="space") as full:
            await device.allocate(1)
        assert full.value.errno == errno.ENOSPC
        assert await device.write([Transfer(0, 0, pages(1))]) is None
        device.close()


async def test_after_close_nothing_is_opened_any_more(device: FileDevice) -> None:
    await device.allocate(0)
    device.close()
    assert device.busy() == 0
    assert device._files._descriptors == {}
    with pytest.raises(OSError, match="closed"):
        device._files.allocate(1)


async def test_files_stay_open_for_a_call_that_hangs_and_no_longer(
    device: FileDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its bytes would go to another file; and then the folder's filesystem can be detached."""
    await device.allocate(0)
    begun, held, write = threading.Event(), threading.Event(), os.pwritev
    written: list[int] = []

    def hanging(descriptor: int, buffers: list[memoryview], at: int) -> int:
        begun.set()
        held.wait(PATIENCE_S)
        written.append(write(descriptor, buffers, at))
        return written[-1]

    monkeypatch.setattr(os, "pwritev", hanging)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(device.write, [Transfer(0, 0, pages(1))])
        await anyio.to_thread.run_sync(begun.wait, PATIENCE_S)
        device.close()
        tasks.cancel_scope.cancel()
    assert device._files._descriptors
    held.set()
    await until_true(lambda: not device._files._descriptors)
    assert written == [PAGE]


def test_what_lies_beyond_the_capacity_is_cut_off(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"segment-{number:05d}.kv").write_bytes(bytes(2 * REGION_BYTES))
    (tmp_path / "other").write_bytes(b"x")
    assert trim_segments(Segments(str(tmp_path), REGION_BYTES, 2), 3, highest=4) == 3
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {
        "segment-00000.kv": 2 * REGION_BYTES,
        "segment-00001.kv": REGION_BYTES,
        "other": 1,
    }


async def test_a_file_without_holes_is_not_allocated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart all is allocated; asking again would wait for what is being written."""
    before = make(tmp_path)
    await before.allocate(0)
    await before.allocate(1)
    before.close()
    asked: list[int] = []
    real = device_module.reserve

    def count(descriptor: int, at: int, size: int) -> OSError | None:
        asked.append(at)
        return real(descriptor, at, size)

    monkeypatch.setattr(device_module, "reserve", count)
    device = make(tmp_path)
    await device.allocate(1)
    assert asked == []
    os.truncate(tmp_path / "segment-00000.kv", REGION_BYTES)
    await device.allocate(1)
    os.truncate(tmp_path / "segment-00000.kv", 0)
    await device.allocate(1)
    await device.allocate(0)  # a hole by now
    assert asked == [REGION_BYTES, REGION_BYTES, 0]
    device.close()
