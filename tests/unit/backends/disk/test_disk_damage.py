"""Whatever happens to the bytes of a folder, nothing wrong is ever served from it."""

from __future__ import annotations

import os
import random
import shutil
from typing import TYPE_CHECKING

import pytest

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk import format as fmt
from tests.unit.backends._seeds import seeds
from tests.unit.backends.disk._disk import (
    CAPACITY_BYTES,
    OTHER_CONTEXT,
    fill,
    folder_bytes,
    make_disk,
    open_disk,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio
BLOCKS = 120


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("segment-*.kv"))


def flip_bits(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        for _ in range(rng.randrange(1, 200)):
            at = rng.randrange(path.stat().st_size)
            file.seek(at)
            byte = file.read(1)[0] ^ (1 << rng.randrange(8))
            file.seek(at)
            file.write(bytes([byte]))


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def swap_pages(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 60)):
        size = 4096 * rng.choice([1, 1, 2, 16])
        here, there = (rng.randrange(len(raw) // 4096) * 4096 for _ in range(2))
        if min(here, there) + size <= max(here, there) and max(here, there) + size <= len(raw):
            raw[here : here + size], raw[there : there + size] = (
                raw[there : there + size],
                raw[here : here + size],
            )
    path.write_bytes(raw)


def zero(path: Path, rng: random.Random) -> None:
    start = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(min(rng.randrange(1, 200_000), path.stat().st_size - start)))


DAMAGES = [flip_bits, truncate, swap_pages, zero]


@pytest.mark.parametrize("seed", seeds(5, of=12))
@pytest.mark.parametrize("damage", DAMAGES)
async def test_no_damage_to_a_segment_makes_a_wrong_block(
    damage: Callable[[Path, random.Random], None], seed: int, tmp_path: Path
) -> None:
    """``load`` of the bench asserts that what passes its digest is what was stored."""
    numbers = await fill(tmp_path / "kv", BLOCKS)
    rng = random.Random(seed)
    damage(rng.choice(segments(tmp_path / "kv")), rng)
    async with open_disk(tmp_path / "kv") as disk:
        for number in numbers:
            (outcome,) = await disk.load(number)
            assert outcome in (Outcome.DONE, Outcome.ABSENT, Outcome.DAMAGED)
            if outcome is Outcome.DAMAGED:
                await disk.remove(number)
        # And it goes on as if nothing had happened.
        assert await disk.store(*range(BLOCKS, BLOCKS + 20)) == [Outcome.DONE] * 20
        assert await disk.found(range(BLOCKS, BLOCKS + 20)) == list(range(BLOCKS, BLOCKS + 20))
    assert folder_bytes(tmp_path / "kv") <= CAPACITY_BYTES


@pytest.mark.parametrize("seed", range(6))
async def test_damage_under_a_running_engine_is_no_wrong_block_either(
    seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    numbers = await fill(tmp_path / "kv", BLOCKS)
    async with open_disk(tmp_path / "kv", direct=False) as disk:
        outcomes: list[Outcome] = []
        for damage in (flip_bits, zero, truncate):
            damage(rng.choice(segments(tmp_path / "kv")), rng)
            outcomes = [(await disk.load(number))[0] for number in numbers]
            assert set(outcomes) <= {Outcome.DONE, Outcome.DAMAGED}
        assert Outcome.DAMAGED in outcomes


async def test_a_segment_that_is_gone_costs_its_blocks_only(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    await fill(path, BLOCKS)
    segments(path)[0].unlink()
    async with open_disk(path) as disk:
        assert await disk.found(range(BLOCKS)) == []
        assert await disk.store(1) == [Outcome.DONE]
        assert await disk.load(1) == [Outcome.DONE]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("reads_first", [True, False])
async def test_a_segment_that_goes_under_an_engine_serves_until_it_ends(
    tmp_path: Path, *, direct: bool, reads_first: bool
) -> None:
    """Whoever wrote it has it open; a tier that can't read what it takes is of no use."""
    path = tmp_path / "kv"
    async with open_disk(path, direct=direct) as disk:
        assert await disk.store(1) == [Outcome.DONE]
        if reads_first:
            assert await disk.load(1) == [Outcome.DONE]
        segments(path)[0].unlink()
        assert await disk.load(1) == [Outcome.DONE]
        assert await disk.store(2) == [Outcome.DONE]
        assert await disk.load(2) == [Outcome.DONE]


async def test_one_copy_of_the_superblock_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    numbers = await fill(path, BLOCKS)
    for damaged in (0, 1):
        raw = bytearray((path / "superblock").read_bytes())
        good = bytes(raw)
        raw[damaged * 4096 + 100] ^= 1
        (path / "superblock").write_bytes(raw)
        async with open_disk(path) as disk:
            assert await disk.found(numbers) == numbers
        (path / "superblock").write_bytes(good)


@pytest.mark.parametrize("what", ["gone", "damaged", "other version"])
async def test_without_its_superblock_a_folder_begins_anew(what: str, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    numbers = await fill(path, BLOCKS)
    superblock = path / "superblock"
    page = superblock.read_bytes()[:4096]
    if what == "gone":
        superblock.unlink()
    elif what == "damaged":
        superblock.write_bytes(b"x" * 8192)
    else:
        superblock.write_bytes(fmt._with_checksum(page[:8] + b"\x07" + page[9:-8]) * 2)
    async with open_disk(path) as disk:
        assert await disk.found(numbers) == []
        assert disk.count("segments_removed") == 1
        assert sum(disk.count(f"folder_{why}") for why in ("damaged", "other_version")) == (
            what != "gone"
        )
        assert await disk.store(1) == [Outcome.DONE]


async def test_segments_from_another_folder_are_not_served(tmp_path: Path) -> None:
    """Keys and namespace fit, yet nobody knows whether these bytes belong to this engine."""
    numbers = await fill(tmp_path / "a", BLOCKS)
    async with open_disk(tmp_path / "b") as disk:
        await disk.store(500)
    shutil.copy(segments(tmp_path / "a")[0], segments(tmp_path / "b")[0])
    async with open_disk(tmp_path / "b") as disk:
        assert await disk.found(numbers) == []
        assert disk.count("region_other_folder") > 0


async def test_a_whole_folder_that_was_copied_is_served(tmp_path: Path) -> None:
    numbers = await fill(tmp_path / "a", BLOCKS)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    async with open_disk(tmp_path / "b") as disk, open_disk(tmp_path / "a") as original:
        assert await disk.found(numbers) == await original.found(numbers) == numbers


async def test_another_models_blocks_are_neither_served_nor_overwritten_first(
    tmp_path: Path,
) -> None:
    numbers = await fill(tmp_path / "kv", BLOCKS)
    async with open_disk(tmp_path / "kv", OTHER_CONTEXT) as disk:
        assert await disk.found(numbers) == []
        assert disk.count("region_foreign") > 0
        assert await disk.store(1, 2, 3) == [Outcome.DONE] * 3
    async with open_disk(tmp_path / "kv") as disk:
        assert await disk.found(numbers) == numbers


async def test_a_smaller_capacity_cuts_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    numbers = await fill(path, BLOCKS)
    assert folder_bytes(path) > CAPACITY_BYTES // 2
    async with open_disk(path, capacity_bytes=CAPACITY_BYTES // 2) as disk:
        assert folder_bytes(path) <= CAPACITY_BYTES // 2
        assert disk.count("segments_truncated") == 1
        found = await disk.found(numbers)
        assert 10 < len(found) < BLOCKS
        assert len(disk.contents()) <= disk.capacity


async def test_a_larger_capacity_keeps_what_is_there(tmp_path: Path) -> None:
    numbers = await fill(tmp_path / "kv", BLOCKS)
    async with open_disk(tmp_path / "kv", capacity_bytes=4 * CAPACITY_BYTES) as disk:
        assert await disk.found(numbers) == numbers


async def test_other_region_bytes_begin_anew(tmp_path: Path) -> None:
    numbers = await fill(tmp_path / "kv", BLOCKS)
    async with open_disk(tmp_path / "kv", region_bytes=1 << 18) as disk:
        assert await disk.found(numbers) == []
        assert disk.count("folder_other_layout") == 1
    backend = make_disk(tmp_path / "kv")
    assert backend._plan.geometry.region_bytes == 1 << 18, "without the option, what is there"
    await backend.close()
