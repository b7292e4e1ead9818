"""Options, claims, bounds, restarts and faults of the disk backend, on a real filesystem."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import stat
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import LoadBlock, Outcome
from kvtier_backends.disk.batch_sizes import disk_traits
from kvtier_backends.disk.folder.claim import (
    capacity_bytes_for,
    capacity_bytes_min,
    plan_folder,
)
from kvtier_backends.disk.log.regions import WRITE_AMPLIFICATION_MAX
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S
from tests.unit.backends._media import mount, tmpfs
from tests.unit.backends.disk._disk import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    Clock,
    Disk,
    folder_bytes,
    key_of,
    key_options,
    make_disk,
    open_disk,
)

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.anyio


# --- options ---


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"capacity_bytes": 1}, "capacity_bytes=1 has no room"),
        ({"region_bytes": 5000}, "multiple of 4096"),
        (
            {"region_bytes": CAPACITY_BYTES // 4096 * 4096},
            "no room for 4 regions in capacity_bytes",
        ),
        (
            {"region_bytes": 8192},
            "region_bytes=8192 has no room for one block of 8192 bytes; give it 20480",
        ),
        ({"io_depth": 0}, "io_depth=0"),
        ({"ttl_s": -1}, "ttl_s=-1"),
        ({"direct": 1}, "direct=1"),
        ({"checksum": "none"}, "checksum='none' must be 'xxh3_128'"),
        ({"checksum": False}, "checksum=False must be 'xxh3_128'"),
        ({"pathh": "x"}, "did you mean 'path'"),
    ],
)
async def test_a_bad_option_is_refused_with_its_name(
    options: dict[str, Any], names: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=names):
        make_disk(tmp_path / "kv", **options)
    # The folder was released. The one checksum may be named.
    async with open_disk(tmp_path / "kv", checksum="xxh3_128") as disk:
        assert await disk.store(1) == [Outcome.DONE]


async def test_the_smallest_capacity_that_is_named_in_the_refusal_works(tmp_path: Path) -> None:
    least = capacity_bytes_min(BLOCK_BYTES, 0)
    with pytest.raises(ConfigError, match=f"{least} or more"):
        make_disk(tmp_path / "kv", capacity_bytes=least - 1)
    async with open_disk(tmp_path / "kv", capacity_bytes=least) as disk:
        assert disk.capacity == 1
        for number in range(20):
            assert await disk.store(number) == [Outcome.DONE]
            assert await disk.load(number) == [Outcome.DONE]
            await disk.remove(number)
    assert folder_bytes(tmp_path / "kv") <= least


@pytest.mark.parametrize("block_bytes", [4096, 65536, 1 << 20, 2 << 20, 5000])
@pytest.mark.parametrize("capacity_bytes", [1 << 26, 10**9, 2 * 10**11])
def test_most_of_the_capacity_is_for_blocks(block_bytes: int, capacity_bytes: int) -> None:
    plan = plan_folder(capacity_bytes, block_bytes, 0, None)
    used = plan.regions * plan.geometry.region_bytes
    assert used <= capacity_bytes
    stride = plan.geometry.stride
    part = plan.capacity_blocks * stride / capacity_bytes
    assert part > (0.85 if capacity_bytes > 10**10 else 0.6 if capacity_bytes > 10**8 else 0.45)


@pytest.mark.parametrize("block_bytes", [100, 4096, 16384, 2 << 20])
@pytest.mark.parametrize("blocks", [1, 84, 2608, 10**6])
def test_a_capacity_for_blocks_advertises_them_and_hardly_more(
    block_bytes: int, blocks: int
) -> None:
    plan = plan_folder(capacity_bytes_for(blocks, block_bytes), block_bytes, 0, None)
    assert blocks <= plan.capacity_blocks <= blocks + plan.geometry.slots


async def test_what_cannot_be_a_tiers_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for path, remedy in (
        ("file", "Name a folder"),
        ("file/below", "Name a folder"),
        ("open", "chmod o-w"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            make_disk(tmp_path / path)


# --- one engine a folder ---


async def test_a_backend_that_was_never_opened_lets_the_folder_go(tmp_path: Path) -> None:
    make_disk(tmp_path / "kv")
    gc.collect()
    async with open_disk(tmp_path / "kv"):
        pass


async def test_a_backend_that_cannot_open_lets_the_folder_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell that begins anew makes the next backend while it still holds this one."""
    backend = make_disk(tmp_path / "kv")
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda _: (_ for _ in ()).throw(OSError(5, "sick")))
        with pytest.raises(OSError, match="sick"):
            await backend.open()
    async with open_disk(tmp_path / "kv"):
        pass


async def test_a_hung_write_keeps_the_folder_claimed_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it might write into what the next engine has put there."""
    monkeypatch.setattr("kvtier_backends.disk.backend.CLOSE_TIMEOUT_S_MAX", 0.01)
    release, entered = threading.Event(), threading.Event()
    real = os.pwritev

    def hang(*arguments: Any) -> int:
        entered.set()
        release.wait()
        return real(*arguments)

    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(1)
        await disk.come_to_rest()
        monkeypatch.setattr(os, "pwritev", hang)
        task = asyncio.get_running_loop().create_task(disk.store(2))
        while not entered.is_set():
            await asyncio.sleep(0)
        assert disk.backend.busy_threads() == 1
        await disk.backend.close()
        assert disk.backend.busy_threads() == 1, "the slot's memory must stay mapped"
        with pytest.raises(ConfigError, match="in use"):
            make_disk(tmp_path / "kv")
        release.set()
        await task
    for thread in threading.enumerate():
        if thread.name.endswith("-release"):
            thread.join()
    async with open_disk(tmp_path / "kv") as disk:
        assert await disk.load(1) == [Outcome.DONE]


# --- bounds, restart ---


@pytest.mark.parametrize("keys", [(), ("11" * 32, "22" * 32)], ids=["plain", "rotated key"])
async def test_the_folder_never_holds_more_than_its_capacity(
    keys: tuple[str, ...], tmp_path: Path
) -> None:
    """Random stores, removals and restarts; the model is the set of what should be there."""
    path = tmp_path / "kv"
    rng = random.Random(7)
    next_number = 0
    written = again = 0
    resident: list[int] = []
    for life in range(4):
        # Blocks that are reinserted still open, beside others under the key of before.
        options = key_options(tmp_path, *keys[1 - life // 2 :])
        async with open_disk(path, **options) as disk:
            capacity = disk.capacity
            there = set(disk.contents())
            assert len(there) <= capacity
            resident = [number for number in range(next_number) if key_of(number) in there]
            assert await disk.found(resident) == resident
            for _ in range(60):
                count = rng.randrange(1, 17)
                rng.shuffle(resident)
                excess = max(0, len(resident) + count - capacity)
                await disk.remove(*resident[:excess])
                numbers = range(next_number, next_number + count)
                next_number += count
                assert await disk.store(*numbers) == [Outcome.DONE] * count
                resident = [*resident[excess:], *numbers]
                lost = set(disk.lost)
                resident = [number for number in resident if key_of(number) not in lost]
                assert folder_bytes(path) <= CAPACITY_BYTES
            assert await disk.found(resident) == resident
            written += disk.count("bytes_stored")
            again += disk.count("bytes_reinserted")
    assert written == next_number * BLOCK_BYTES
    assert 0 < again <= (WRITE_AMPLIFICATION_MAX - 1) * written


async def test_what_stores_in_order_have_earned_pays_for_evictions_out_of_order_later(
    tmp_path: Path,
) -> None:
    """So it is with conversations: stored in turns, they leave most of a region at first."""
    async with open_disk(tmp_path / "kv", capacity_bytes=4 * CAPACITY_BYTES) as disk:
        slots = disk.log.regions.slots
        number = 0
        for _ in range(2 * disk.log.regions.count):  # oldest first: whole regions become free
            numbers = range(number, number + slots)
            await disk.remove(*(each - disk.capacity for each in numbers))
            assert await disk.store(*numbers) == [Outcome.DONE] * slots
            number += slots
        await disk.come_to_rest()
        assert not disk.count("bytes_reinserted")
        oldest = disk.log.regions.oldest_first()[: disk.log.regions.count * 3 // 4]
        there = [key for region in oldest for key in disk.log.index.keys_of(region)]
        await disk.backend.remove(there[::3])
        for _ in range(len(there) // 3 // slots):
            assert await disk.store(*range(number, number + slots)) == [Outcome.DONE] * slots
            number += slots
        await disk.come_to_rest()
        assert not disk.lost
        assert disk.count("bytes_reinserted") > 6 * slots * BLOCK_BYTES
        written = disk.count("bytes_reinserted") + disk.count("bytes_of_tables")
        assert written < (WRITE_AMPLIFICATION_MAX - 1) * disk.count("bytes_stored")


async def test_after_a_restart_no_more_than_the_capacity_is_there_in_the_order_of_storing(
    tmp_path: Path,
) -> None:
    """What was removed is in the tables still; it must not crowd out what was not."""
    async with open_disk(tmp_path / "kv") as disk:
        capacity = disk.capacity
        for number in range(capacity + 12):
            if number >= capacity:
                await disk.remove(number - capacity)
            assert await disk.store(number) == [Outcome.DONE]
    async with open_disk(tmp_path / "kv") as disk:
        assert disk.contents() == [key_of(number) for number in range(12, capacity + 12)]
        assert disk.count("blocks_recovered") == disk.count("blocks") == capacity


# --- what runs at once ---


async def test_io_depth_loads_run_at_once_and_each_reads_neighbours_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How a job is cut into them is shown in ``tests/unit/tier/test_batching.py``."""
    together = threading.Barrier(4, timeout=PATIENCE_S)
    reads: list[int] = []
    real = os.preadv

    def read_together(descriptor: int, buffers: list[memoryview], at: int) -> int:
        reads.append(len(buffers))
        together.wait()  # breaks, and so fails the load, unless so many read at once
        return real(descriptor, buffers, at)

    options = {"io_depth": 4, "capacity_bytes": 8 << 20, "region_bytes": 64 * BLOCK_BYTES}
    async with open_disk(tmp_path / "kv", **options) as disk:
        assert await disk.store(*range(32)) == [Outcome.DONE] * 32
        monkeypatch.setattr(os, "preadv", read_together)
        blocks = [LoadBlock(key_of(n), disk.slots.view(n)) for n in range(32)]
        loads = [disk.backend.load(blocks[first : first + 8]) for first in range(0, 32, 8)]
        ends = [loaded.outcome for each in await asyncio.gather(*loads) for loaded in each]
        assert ends == [Outcome.DONE] * 32
        assert reads == [8] * 4


@pytest.mark.parametrize(
    ("block_bytes", "batches", "loads", "stores"),
    [(1 << 16, 4, (16, 64), (64, 64)), (1 << 20, 12, (1, 8), (4, 8))],
)
def test_batches_have_a_mebibyte_and_stores_four_as_far_as_64_blocks_have_so_much(
    block_bytes: int, batches: int, loads: tuple[int, int], stores: tuple[int, int]
) -> None:
    traits = disk_traits(block_bytes, 4, 1000)
    assert traits.load_batches_max == traits.store_batches_max == batches
    assert (traits.load_batch_blocks_min, traits.load_batch_blocks_max) == loads
    assert (traits.store_batch_blocks_min, traits.store_batch_blocks_max) == stores


# --- age ---


async def test_old_blocks_are_swept_told_and_not_recovered(tmp_path: Path) -> None:
    clock = Clock()
    backend = make_disk(tmp_path / "kv", clock=clock, ttl_s=100)
    clock.now_s = 1e9
    await backend.open()
    disk = Disk(backend)
    await disk.store(1)
    clock.now_s += 60
    await disk.store(2)
    for _ in range(50):
        await backend.tick()
    assert disk.lost == []
    clock.now_s += 60
    for _ in range(50):
        await backend.tick()
    assert disk.lost == [key_of(1)]
    assert (await backend.probe([key_of(1), key_of(2)])) == [False, True]
    await backend.close()
    backend = make_disk(tmp_path / "kv", clock=clock, ttl_s=100)
    await backend.open()
    assert list(backend.contents()) == [[key_of(2)]]
    assert backend.counters()["entries_expired"] == 1
    await backend.close()


@pytest.mark.parametrize("leap_s", [60, 3600, -60, -3600])
async def test_a_clock_that_leaps_costs_no_block_before_its_time(
    leap_s: int, tmp_path: Path
) -> None:
    """A node's clock is set right under an engine, and between two."""
    begun_s = 1e9
    set_right_s = begun_s + leap_s
    async with open_disk(tmp_path / "kv", ttl_s=7200) as disk:
        disk.clock.now_s = begun_s
        assert await disk.store(1) == [Outcome.DONE]
        disk.clock.now_s = set_right_s
        assert await disk.store(2) == [Outcome.DONE]
        for _ in range(50):
            await disk.backend.tick()
        assert disk.lost == []
        assert await disk.found([1, 2]) == [1, 2]
    clock = Clock()
    clock.now_s = set_right_s
    backend = make_disk(tmp_path / "kv", clock=clock, ttl_s=7200)
    await backend.open()
    disk = Disk(backend, clock)
    assert await disk.found([1, 2]) == [1, 2]
    clock.now_s += 7201 + abs(leap_s)
    for _ in range(50):
        await backend.tick()
    assert sorted(disk.lost) == sorted(map(key_of, (1, 2))), "and none stays for ever"
    await backend.close()


# --- faults ---


@needs("mount")
async def test_a_disk_that_others_fill_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "1m") as mounted:
        async with open_disk(mounted / "kv") as disk:
            outcomes = [(await disk.store(number))[0] for number in range(300)]
            assert set(outcomes) == {Outcome.DONE}, "old blocks make room"
            assert disk.count("no_room_for_a_region") == 1
            lost = set(disk.lost)
            kept = [number for number in range(300) if key_of(number) not in lost]
            assert 30 < len(kept) < 128
            assert await disk.found(range(300)) == kept
            assert disk.count("regions_retired") > 0
            mount("-o", "remount,size=4m", mounted)
            disk.clock.now_s = 2e9
            await disk.backend.tick()
            await disk.come_to_rest()
            assert disk.count("regions_retired") == 0, "there is room for them"
            assert await disk.store(*range(1000, 1040)) == [Outcome.DONE] * 40
            lost = set(disk.lost)
        async with open_disk(mounted / "kv") as disk:
            # What was dropped may come back as long as nothing was written over it.
            kept = [number for number in kept if key_of(number) not in lost]
            assert set(await disk.found(range(1040))) >= {*kept, *range(1000, 1040)}


async def test_a_folder_that_vanishes_fails_stores_and_is_used_again(tmp_path: Path) -> None:
    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(1, 2, 3)
        (tmp_path / "kv").rename(tmp_path / "away")
        (tmp_path / "kv").write_bytes(b"in the way")
        await disk.backend.tick()
        assert sorted(disk.lost) == sorted(key_of(number) for number in (1, 2, 3))
        assert await disk.load(1) == [Outcome.ABSENT]
        assert await disk.store(4) == [Outcome.FAILED]
        await disk.backend.tick()
        assert await disk.store(4) == [Outcome.FAILED]
        (tmp_path / "kv").unlink()
        await disk.backend.tick()
        assert await disk.store(4) == [Outcome.DONE]
        assert await disk.load(4) == [Outcome.DONE]
        assert disk.count("folder_came_back") == 1
        assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
        with pytest.raises(ConfigError, match="in use"):
            make_disk(tmp_path / "kv")
    async with open_disk(tmp_path / "kv") as disk:
        assert await disk.found([1, 2, 3, 4]) == [4]


async def test_a_folder_that_comes_back_is_empty_until_the_next_start(tmp_path: Path) -> None:
    """What was told to be lost stays lost for this engine; the next one finds what is left."""
    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(*range(40))
        (tmp_path / "kv").rename(tmp_path / "away")
        await disk.backend.tick()
        shutil.rmtree(tmp_path / "kv", ignore_errors=True)
        (tmp_path / "away").rename(tmp_path / "kv")
        await disk.backend.tick()
        assert await disk.found(range(40)) == []
        assert await disk.store(100) == [Outcome.DONE]
        assert disk.count("entries_over") == 0, "they are left out on purpose"
    async with open_disk(tmp_path / "kv") as disk:
        found = await disk.found([*range(40), 100])
        assert 100 in found
        assert len(found) > 20


async def test_a_closed_backend_answers_and_serves_nothing(tmp_path: Path) -> None:
    async with open_disk(tmp_path / "kv") as disk:
        assert await disk.store(1) == [Outcome.DONE]
        await disk.backend.close()
        assert list(await disk.backend.probe([key_of(1)])) == [False]
        assert await disk.load(1) == [Outcome.ABSENT]
        assert await disk.store(1) == [Outcome.FAILED]
        await disk.remove(1)
        assert disk.contents() == []
        assert disk.backend.busy_threads() == 0
