"""What is told of a folder from outside: all that is there, all that is damaged, and no more."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Outcome
from kvtier_backends.disk import format as fmt
from kvtier_backends.disk.offline import inspection
from kvtier_backends.disk.offline.fsck import Checked, Checker, folder_damaged
from kvtier_backends.disk.offline.inspection import Folder, FolderDamaged, user_of
from kvtier_backends.disk.offline.listing import Holding, Listing, list_folder
from kvtier_backends.disk.offline.region_files import RegionFiles
from kvtier_backends.encryption.keys import Keyring, parse_keys_untrusted
from tests.unit.backends._seeds import seeds
from tests.unit.backends.disk._disk import (
    BLOCK_BYTES,
    CONTEXT,
    OTHER_CONTEXT,
    data_of,
    fill,
    key_options,
    open_disk,
)
from tests.unit.backends.disk.test_disk_damage import DAMAGES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


pytestmark = pytest.mark.anyio
BLOCKS = 60
OLD = "11" * 32


def listed(path: Path) -> Listing:
    with Folder(str(path)) as folder:
        return list_folder(folder, folder.files.numbers(), lambda: None)


def only(listing: Listing) -> Holding:
    (holding,) = listing.holdings.values()
    return holding


def check(path: Path, *, repair: bool = False, keyring: Keyring | None = None) -> Checked:
    with Folder(str(path), writable=repair) as folder:
        checker = Checker(folder, keyring, repair=repair)
        return checker.run(folder.files.numbers(), lambda: None)


def cases(checked: Checked) -> set[str]:
    return {problem.case for problem in checked.problems}


def segment(path: Path) -> Path:
    (found,) = path.glob("segment-*.kv")
    return found


def flip(path: Path, at: int) -> None:
    with segment(path).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ 1
        file.seek(at)
        file.write(bytes([byte]))


def place_of(path: Path, number: int) -> int:
    """Return where in the segment a block's bytes are."""
    return segment(path).read_bytes().index(data_of(number)[:4096])


# --- listing ---


async def test_a_listing_counts_each_namespace_and_each_key_once(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    await fill(path, BLOCKS)
    async with open_disk(path, OTHER_CONTEXT) as disk:
        await disk.store(1, 2, 3)
        await disk.remove(1)
        await disk.store(1)  # a second copy; the first one is in the table still
    listing = listed(path)
    assert listing.user is None
    blocks = {kind.namespace: found.keys.count() for kind, found in listing.holdings.items()}
    assert blocks == {fmt.namespace_digest(CONTEXT): BLOCKS, fmt.namespace_digest(OTHER_CONTEXT): 3}
    assert {kind.block_bytes for kind in listing.holdings} == {BLOCK_BYTES}
    assert {kind.key_id for kind in listing.holdings} == {fmt.NO_KEY_ID}
    assert listing.regions["region_sound"] == sum(h.regions for h in listing.holdings.values())
    assert listing.bytes_on_disk >= BLOCKS * BLOCK_BYTES


async def test_ages_are_those_of_the_oldest_and_the_newest_block(tmp_path: Path) -> None:
    async with open_disk(tmp_path / "kv") as disk:
        for number, disk.clock.now_s in enumerate([5000.0, 3000.0, 9000.0]):
            await disk.store(number)
    holding = only(listed(tmp_path / "kv"))
    assert (holding.oldest_s, holding.newest_s) == (3000, 9000)


async def test_an_open_folder_is_listed_with_its_engine(tmp_path: Path) -> None:
    async with open_disk(tmp_path / "kv") as disk:
        await disk.store(1, 2)
        listing = listed(tmp_path / "kv")
        assert listing.user is not None
        assert listing.user.pid == os.getpid()
        assert only(listing).keys.count() == 2
    assert user_of(str(tmp_path / "kv")) is None


async def test_looking_verifies_all_blocks_of_a_sound_folder_and_changes_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "kv"
    await fill(path, BLOCKS)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
    listed(path)
    checked = check(path)
    assert (checked.problems, checked.blocks) == ([], BLOCKS)
    assert checked.bytes_read == BLOCKS * BLOCK_BYTES
    after = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
    assert after == before


# --- folders that are none ---


async def test_what_is_no_disk_folder_is_named_and_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent does not exist"):
        Folder(str(tmp_path / "absent"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="file is not a folder"):
        Folder(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="no folder of a disk tier"):
        Folder(str(tmp_path))


async def test_a_folder_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fmt, "FORMAT_VERSION", 9)
        await fill(tmp_path / "kv", BLOCKS)
    with pytest.raises(ConfigError, match=r"another version of kvtier \(version 9"):
        Folder(str(tmp_path / "kv"))


async def test_a_damaged_superblock_is_told_and_what_is_left_removed(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    await fill(path, BLOCKS)
    sound = (path / "superblock").read_bytes()
    (path / "superblock").write_bytes(b"x" + sound[1:])
    assert cases(check(path)) == {"superblock_copy_damaged"}
    assert check(path, repair=True).repaired == 1
    assert not check(path).problems
    (path / "superblock").write_bytes(bytes(len(sound)))
    with pytest.raises(FolderDamaged, match="starts with an empty folder"):
        Folder(str(path))
    assert cases(folder_damaged(str(path), repair=True)) == {"folder_damaged"}
    assert [file.name for file in path.iterdir()] == ["lock"]
    async with open_disk(path) as disk:
        assert await disk.store(1) == [Outcome.DONE]


# --- checking ---


async def test_a_block_under_another_ones_key_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    await fill(path, BLOCKS)
    raw = bytearray(segment(path).read_bytes())
    here, there = place_of(path, 10), place_of(path, 20)
    raw[here : here + BLOCK_BYTES], raw[there : there + BLOCK_BYTES] = (
        raw[there : there + BLOCK_BYTES],
        raw[here : here + BLOCK_BYTES],
    )
    segment(path).write_bytes(raw)
    assert sum(problem.size for problem in check(path).problems) == 2


@pytest.mark.parametrize(
    ("at", "case", "lost"),
    [
        (100, "region_damaged", 16),
        (4096 + 100, "table_torn", 0),
        (2 * 4096 + 100, "table_torn", 1),
        (None, "blocks_damaged", 1),
    ],
    ids=["header", "table", "its last version", "block 37"],
)
async def test_a_flipped_bit_has_its_name_is_repaired_and_the_rest_is_served(
    at: int | None, case: str, lost: int, tmp_path: Path
) -> None:
    path = tmp_path / "kv"
    await fill(path, BLOCKS)
    flip(path, place_of(path, 37) + 5000 if at is None else at)
    (problem,) = check(path).problems
    assert (problem.case, problem.size) == (case, 1)
    assert check(path, repair=True).repaired == 1
    checked = check(path)
    assert (checked.problems, checked.blocks) == ([], BLOCKS - lost)
    async with open_disk(path) as disk:
        assert len(await disk.found(range(BLOCKS))) == checked.blocks


async def test_a_file_that_ends_within_a_table_is_cut_before_its_region(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    await fill(path, BLOCKS)
    os.truncate(segment(path), 2 * 4096)
    assert cases(check(path, repair=True)) == {"table_truncated", "blocks_truncated"}
    assert segment(path).stat().st_size == 0
    assert check(path).problems == []


async def test_a_region_of_another_folder_is_named_and_erased(tmp_path: Path) -> None:
    await fill(tmp_path / "kv", BLOCKS)
    await fill(tmp_path / "other", BLOCKS)
    with Folder(str(tmp_path / "kv")) as folder:
        size = folder.superblock.region_bytes
    raw = bytearray(segment(tmp_path / "kv").read_bytes())
    raw[:size] = segment(tmp_path / "other").read_bytes()[:size]
    raw[size : 2 * size] = raw[2 * size : 3 * size]
    segment(tmp_path / "kv").write_bytes(raw)
    assert cases(check(tmp_path / "kv", repair=True)) == {"region_other_folder", "region_misplaced"}
    checked = check(tmp_path / "kv")
    assert checked.problems == []
    assert checked.regions["region_never_used"] >= 2


@pytest.mark.parametrize("seed", seeds(3, of=6))
@pytest.mark.parametrize("damage", DAMAGES)
async def test_after_a_repair_of_any_damage_all_is_sound_and_served(
    damage: Callable[[Path, random.Random], None], seed: int, tmp_path: Path
) -> None:
    """What a check calls sound, an engine must serve."""
    path = tmp_path / "kv"
    await fill(path, BLOCKS)
    damage(segment(path), random.Random(seed))
    before = check(path)
    repaired = check(path, repair=True)
    assert repaired.problems == before.problems
    assert repaired.repaired == len(repaired.problems)
    after = check(path)
    assert after.problems == []
    assert after.blocks == before.blocks
    async with open_disk(path) as disk:
        assert len(await disk.found(range(BLOCKS))) == after.blocks


# --- encryption ---


async def test_encrypted_blocks_are_verified_with_the_key_only(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    await fill(path, BLOCKS, **key_options(tmp_path, OLD))
    keyring = parse_keys_untrusted(OLD)
    assert only(listed(path)).kind.key_id == keyring.current_id
    checked = check(path)
    assert (checked.problems, checked.blocks, checked.blocks_unverified) == ([], 0, BLOCKS)
    assert check(path, keyring=parse_keys_untrusted("22" * 32)).blocks_unverified == BLOCKS
    checked = check(path, keyring=keyring)
    assert (checked.problems, checked.blocks, checked.blocks_unverified) == ([], BLOCKS, 0)
    with Folder(str(path)) as folder:
        report = folder.inspect(0)
        assert report.geometry is not None
        flip(path, report.geometry.slot_at(3) + 100)
    assert check(path).problems == []
    (problem,) = check(path, keyring=keyring, repair=True).problems
    assert (problem.case, problem.what) == ("blocks_damaged", "in slots 3")
    assert check(path, keyring=keyring).blocks == BLOCKS - 1


# --- under an engine that is at work ---


async def test_what_an_engine_replaces_meanwhile_is_never_called_damaged(tmp_path: Path) -> None:
    """Regions turn over all the time; each look and each check must find only sound things."""
    path = tmp_path / "kv"
    stopped = threading.Event()
    async with open_disk(path) as disk:
        capacity = disk.capacity
        await disk.store(0)
        looking = asyncio.get_running_loop().run_in_executor(None, check_until, stopped, path)
        for first in range(1, 4 * capacity, 8):
            numbers = range(first, first + 8)
            await disk.remove(*(n - capacity + 8 for n in numbers if n >= capacity - 8))
            await disk.store(*numbers)
        stopped.set()
        assert await looking == []


def check_until(stopped: threading.Event, path: Path) -> list[object]:
    found: list[object] = []
    while True:
        found += [case for case in listed(path).regions if case not in NOT_DAMAGED]
        found += check(path).problems
        if stopped.is_set():
            return found


NOT_DAMAGED = {"region_sound", "region_never_used", "in_use"}


@pytest.mark.parametrize(("torn_reads", "in_use"), [(1, 0), (3, 0), (1000, 1)])
async def test_a_table_page_that_is_being_written_is_read_again(
    torn_reads: int, in_use: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Different bytes each time: an engine is at it. Once it rests, the page is sound."""
    monkeypatch.setattr(inspection, "INSPECT_AGAIN_S", 0)
    path = tmp_path / "kv"
    await fill(path, BLOCKS)
    real = RegionFiles.read
    reads = 0

    def torn(self: RegionFiles, region: int, at: int, size: int) -> bytes:
        nonlocal reads
        raw = real(self, region, at, size)
        if region == 0 and size > 4096 and reads < torn_reads:
            reads += 1
            raw = raw[:5000] + os.urandom(8) + raw[5008:]
        return raw

    monkeypatch.setattr(RegionFiles, "read", torn)
    checked = check(path)
    assert checked.problems == []
    assert checked.regions["in_use"] == in_use
    assert (checked.blocks == BLOCKS) == (in_use == 0)


async def test_a_block_that_goes_while_it_is_checked_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the region is opened anew between the look at its table and the read."""
    path = tmp_path / "kv"
    await fill(path, BLOCKS)
    real = Checker._read
    calls = 0

    def reopened(self: Checker, *arguments: Any) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            raw = bytearray(segment(path).read_bytes())
            region_bytes = self._folder.superblock.region_bytes
            raw[:region_bytes] = bytes(region_bytes)
            segment(path).write_bytes(raw)
        return real(self, *arguments)

    monkeypatch.setattr(Checker, "_read", reopened)
    checked = check(path)
    assert checked.problems == []
    assert checked.blocks_skipped > 0
    assert checked.blocks + checked.blocks_skipped == BLOCKS
