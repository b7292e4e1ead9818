"""The shared region: who maps it, when its name goes, what a dead engine leaves."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies

from kvtier.errors import ConfigError, InternalError
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.vllm.memory import region as region_module
from kvtier.vllm.memory.region import HostRegion, sweep
from kvtier.vllm.memory.region_header import DOCUMENT_BYTES_MAX, HEADER_BYTES, RegionHeader
from tests.support.patience import PATIENCE_S
from tests.vllm.support.ranks import mapping_rank

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.one_release
PAGE = mmap.PAGESIZE


def open_region(folder: Path, rank: int | None, **changes: Any) -> HostRegion:
    shape: dict[str, Any] = {
        "slot_count": 3,
        "row_bytes": 2 * PAGE,
        "world_size": 2,
        "timeout_s": PATIENCE_S,
        "cpu_bytes_to_use": 6 * PAGE,
        **changes,
    }
    return HostRegion("engine-1", rank=rank, folder=str(folder), **shape)


def test_all_participants_see_the_same_bytes(tmp_path: Path) -> None:
    """Ranks and scheduler map one file; slots are page aligned rows of it."""
    regions = [open_region(tmp_path, rank) for rank in (0, 1, None)]
    memory = SlotMemory(regions[2].rows, 3, 2 * PAGE)
    regions[0].rows[2 * PAGE] = 7
    regions[1].rows[4 * PAGE + 1] = 9
    assert memory.view(1)[0] == 7
    assert memory.view(2)[1] == 9
    memory.release()
    for region in regions:
        region.close()


def test_the_name_goes_once_every_rank_has_mapped(tmp_path: Path) -> None:
    """Until then a late rank could not find the region; after it, nothing can leak."""
    first = open_region(tmp_path, 0)
    scheduler = open_region(tmp_path, None)
    assert not scheduler.try_unlink()
    assert scheduler.path.exists()
    second = open_region(tmp_path, 1)
    assert scheduler.try_unlink()
    assert scheduler.try_unlink()
    assert list(tmp_path.iterdir()) == []
    second.rows[5] = 1
    assert first.rows[5] == 1
    for region in (first, second, scheduler):
        region.close()


def test_close_twice_and_with_views_out(tmp_path: Path) -> None:
    """An exported view keeps its bytes; closing is not an error then."""
    region = open_region(tmp_path, 0)
    view = region.rows[PAGE : 2 * PAGE]
    view[0] = 5
    region.close()
    region.close()
    assert view[0] == 5
    assert list(tmp_path.iterdir()) == []
    assert region.try_unlink()


def test_a_region_of_a_killed_engine_is_swept(tmp_path: Path, log_folder: Path) -> None:
    """SIGKILL before the unlink leaves a file; the next engine removes it."""
    shape = {"slot_count": 2, "row_bytes": PAGE, "world_size": 1, "rank": 0}
    with mapping_rank(log_folder, engine_id="dead", folder=str(tmp_path), **shape) as engine:
        assert sweep(str(tmp_path)) == []  # alive: its lock protects it
        assert engine.kill() == -signal.SIGKILL
    left = tmp_path / "kvtier_dead"
    assert left.exists()
    region = open_region(tmp_path, 0)
    assert not left.exists()
    region.close()


def test_a_sweep_leaves_files_of_others_alone(tmp_path: Path) -> None:
    """Only unlocked regular files with kvtier's prefix are taken."""
    (tmp_path / "psm_other").write_bytes(b"x")
    (tmp_path / "kvtier_folder").mkdir()
    (tmp_path / "kvtier_link").symlink_to(tmp_path / "psm_other")
    held = os.open(tmp_path / "kvtier_held", os.O_CREAT | os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_SH)
    assert sweep(str(tmp_path)) == []
    os.close(held)
    assert sweep(str(tmp_path)) == [tmp_path / "kvtier_held"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "psm_other",
        "kvtier_folder",
        "kvtier_link",
    }


def test_the_sweep_of_a_dead_engine_leaves_a_live_one_whose_name_begins_as_its_does(
    tmp_path: Path,
) -> None:
    """vLLM numbers the further files of one engine so; of kvtier's, each is an engine's own."""
    live = HostRegion(
        "prod.1", slot_count=1, row_bytes=PAGE, world_size=2, rank=0, folder=str(tmp_path)
    )
    dead = tmp_path / "kvtier_prod"
    dead.write_bytes(b"x")
    assert sweep(str(tmp_path)) == [dead]
    assert live.path.exists()
    live.close()


def left_by_vllm(folder: Path, name: str = "vllm_offload_dead.mmap") -> Path:
    """Leave a region as a vLLM does that is killed: with a size and pages, and no lock."""
    path = folder / name
    path.write_bytes(bytes(3 * PAGE))
    return path


def test_vllms_region_of_a_killed_engine_is_swept_with_its_further_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On devices the memory is vLLM's, and a pod's shared memory outlives its containers.

    Without the first file, the next engine of this name would end at the second.
    """
    left = [left_by_vllm(tmp_path, f"vllm_offload_dead.mmap{end}") for end in (".1", ".2", "")]
    other = left_by_vllm(tmp_path, "vllm_offload_dead.mmap.backup")
    assert sorted(sweep(str(tmp_path))) == sorted(left)
    assert list(tmp_path.iterdir()) == [other]
    (line,) = capsys.readouterr().out.splitlines()
    assert "vllm_offload_dead.mmap" in line
    assert f"bytes={9 * PAGE}" in line


@pytest.mark.parametrize("keeps", ["the file open", "a mapping"])
def test_vllms_region_that_a_process_uses_is_left(tmp_path: Path, keeps: str) -> None:
    """vLLM locks nothing; the kernel counts who may write, whatever container it is in."""
    path = left_by_vllm(tmp_path)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fd = os.open(path, os.O_RDWR)
    both = mmap.PROT_READ | mmap.PROT_WRITE
    start = libc.mmap(None, PAGE, both, mmap.MAP_SHARED, fd, 0)
    if keeps == "a mapping":
        os.close(fd)
    else:
        assert libc.munmap(start, PAGE) == 0
    assert sweep(str(tmp_path)) == []
    if keeps == "a mapping":
        assert libc.munmap(start, PAGE) == 0
    else:
        os.close(fd)
    assert sweep(str(tmp_path)) == [path]


def test_vllms_region_that_may_just_be_made_is_left(tmp_path: Path) -> None:
    """Between its making and its opening nobody has it open; it gets its size after both."""
    path = tmp_path / "vllm_offload_new.mmap"
    path.touch()
    assert sweep(str(tmp_path)) == []
    assert path.exists()


def test_regions_of_another_user_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root could remove them."""
    (tmp_path / "kvtier_left").write_bytes(b"x")
    left_by_vllm(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1 + tmp_path.stat().st_uid)
    assert sweep(str(tmp_path)) == []


def test_a_kernel_that_does_not_tell_who_uses_vllms_region_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sandboxes have no leases. What may be in use stays, and the log says what to do about it."""
    path = left_by_vllm(tmp_path)
    real = fcntl.fcntl

    def without_leases(fd: int, command: int, argument: int) -> int:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", without_leases)
    assert sweep(str(tmp_path)) == []
    told = capsys.readouterr().out
    assert str(path) in told
    assert "remove the file" in told


def test_who_opens_a_region_that_is_just_swept_ends_nobody(tmp_path: Path) -> None:
    """The kernel signals the holder of a lease, and the signal that it takes unasked is deadly."""
    path = left_by_vllm(tmp_path)
    fd = os.open(path, os.O_RDONLY)
    assert region_module._has_no_writer(path, fd)
    with pytest.raises(BlockingIOError):
        os.open(path, os.O_RDWR | os.O_NONBLOCK)
    os.close(fd)
    os.close(os.open(path, os.O_RDWR))


def test_a_creator_that_loses_its_file_to_a_sweep_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking, a peer's sweep may take the file for a dead one."""
    real, stolen = region_module._lock, []

    def lock_after_a_sweep(fd: int, kind: int) -> bool:
        if not stolen and kind == fcntl.LOCK_SH:
            stolen.append(True)
            (tmp_path / "kvtier_engine-1").unlink()
        return real(fd, kind)

    monkeypatch.setattr(region_module, "_lock", lock_after_a_sweep)
    first = open_region(tmp_path, 0)
    second = open_region(tmp_path, 1)
    second.rows[0] = 3
    assert first.rows[0] == 3
    first.close()
    second.close()


def test_many_ranks_opening_at_once_share_one_region(tmp_path: Path) -> None:
    """Whoever comes first creates; the sweeps of the others do not get in the way."""
    regions: list[HostRegion] = []
    threads = [
        threading.Thread(
            target=lambda rank=rank: regions.append(open_region(tmp_path, rank, world_size=8))
        )
        for rank in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({os.fstat(region.fileno()).st_ino for region in regions}) == 1
    assert regions[0].header.all_mapped()
    for region in regions:
        region.close()


def test_too_little_shared_memory_names_the_key_and_the_remedy(tmp_path: Path) -> None:
    """The operator reads this line, and nothing of the region stays behind."""
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use=77 needs .* Lower cpu_bytes_to_use"):
        open_region(tmp_path, 0, slot_count=1 << 40, cpu_bytes_to_use=77)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_disagree_on_the_shape_do_not_share(tmp_path: Path) -> None:
    """Wrong sizes would mix slots; the second rank refuses, and names all that may be the cause."""
    first = open_region(tmp_path, 0)
    with pytest.raises(ConfigError, match="only one of them can be kvtier") as refused:
        open_region(tmp_path, 1, slot_count=4)
    for part in ("engine_id='engine-1'", "MultiConnector", "secondary_tiers", "ranks disagree"):
        assert part in str(refused.value)
    first.close()


def test_a_second_engine_with_the_same_id_is_refused(tmp_path: Path) -> None:
    """Two engines in one region would overwrite each other's blocks."""
    first = open_region(tmp_path, 0)
    with pytest.raises(ConfigError, match="two engines with one engine_id"):
        open_region(tmp_path, 0)
    with pytest.raises(ConfigError, match="another size"):
        open_region(tmp_path, 0, slot_count=4)
    second = open_region(tmp_path, 1)  # of the first engine, which still finds it by name
    assert first.header.all_mapped()
    second.close()
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_a_creator_that_never_sizes_the_file_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """Unbounded waits at start look like a hang of the whole engine."""
    held = os.open(tmp_path / "kvtier_engine-1", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    with pytest.raises(InternalError, match="not sized in time"):
        open_region(tmp_path, 0, timeout_s=0.02)
    os.close(held)


def test_an_engine_id_that_is_no_file_name_still_works(tmp_path: Path) -> None:
    """Engine ids are free text in vLLM."""
    region = HostRegion(
        "../a b", slot_count=1, row_bytes=PAGE, world_size=1, rank=0, folder=str(tmp_path)
    )
    assert region.path.parent == tmp_path
    region.close()


def header() -> RegionHeader:
    return RegionHeader(memoryview(bytearray(HEADER_BYTES)), world_size=2)


@given(
    strategies.dictionaries(
        strategies.text(max_size=8),
        strategies.none()
        | strategies.booleans()
        | strategies.integers()
        | strategies.text(max_size=20),
    )
)
def test_a_published_document_is_read_back(document: dict[str, Any]) -> None:
    """JSON goes through unchanged; before, there is none."""
    shared = header()
    assert shared.read() is None
    shared.publish(document)
    assert shared.read() == document


def test_half_a_document_is_no_document() -> None:
    """A reader that comes too early sees a wrong CRC and waits."""
    memory = memoryview(bytearray(HEADER_BYTES))
    shared = RegionHeader(memory, world_size=1)
    shared.publish({"model": "a"})
    memory[HEADER_BYTES - DOCUMENT_BYTES_MAX + 3] ^= 1
    assert shared.read() is None


def test_a_document_that_is_too_long_is_refused() -> None:
    """Cut-off facts would be wrong facts."""
    with pytest.raises(InternalError, match="bytes of JSON"):
        header().publish({"x": "y" * HEADER_BYTES})
