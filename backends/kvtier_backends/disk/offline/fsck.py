"""Verifies a folder, region by region and block by block, and drops unsound data.

Problems have the names of recovery's cases, and of the counters of loads. An engine
may run meanwhile, unless something is to be repaired: a block that fails
its check is looked up again, and if its region or its entry has changed by
then, it was replaced and not damaged.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.plugin_api.backend import block_digest
from kvtier_backends.disk.device import SEGMENT_NAME
from kvtier_backends.disk.folder.claim import segment_numbers, write_superblock
from kvtier_backends.disk.folder.recovery import UNREMARKABLE
from kvtier_backends.disk.format import NO_KEY_ID, TAG_BYTES
from kvtier_backends.disk.offline.inspection import damaged_copies, user_of
from kvtier_backends.disk.offline.purging import scrub_region
from kvtier_backends.encryption.cipher import BlockCipher, EncryptedBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvtier_backends.disk.folder.users import User
    from kvtier_backends.disk.format import Entry, RegionHeader
    from kvtier_backends.disk.offline.inspection import Folder, RegionReport
    from kvtier_backends.encryption.keys import Keyring

READ_BYTES_MAX: Final = 8 << 20
SLOTS_SHOWN: Final = 8


class Problem(NamedTuple):
    """One kind of problem in one region."""

    case: str
    region: int | None  #: None: the superblock
    size: int  #: number of regions, table pages, entries or blocks concerned
    what: str  #: for people


@dataclass
class Checked:
    """The result of a check."""

    user: User | None = None
    regions: Counter[str] = field(default_factory=Counter)  #: by recovery's case, or "in_use"
    blocks: int = 0  #: that passed
    bytes_read: int = 0
    blocks_unverified: int = 0  #: encrypted, and the key was not given
    blocks_skipped: int = 0  #: replaced or removed by an engine meanwhile
    problems: list[Problem] = field(default_factory=list)
    repaired: int = 0  #: problems that are gone
    is_complete: bool = True


class Checker:
    """Checks a folder, and repairs it if its files are writable. One thread."""

    def __init__(self, folder: Folder, keyring: Keyring | None, *, repair: bool) -> None:
        """``keyring`` decrypts encrypted blocks. ``repair`` needs the folder to be claimed."""
        self._folder = folder
        self._keyring = keyring
        self._repair = repair
        self._ciphers: dict[tuple[bytes, int], BlockCipher] = {}
        self.checked = Checked(None if repair else user_of(folder.path))

    def run(self, numbers: list[int], advance: Callable[[], None]) -> Checked:
        """Check these regions. Raises ``OSError`` for missing rights; Ctrl-C skips the rest.

        ``advance`` is called after each region.
        """
        try:
            self._check_superblock()
            for number in numbers:
                self._check_region(number)
                advance()
        except KeyboardInterrupt:
            self.checked.is_complete = False
        return self.checked

    def _check_superblock(self) -> None:
        path = self._folder.path
        damaged = damaged_copies(path)
        if damaged:
            self._found("superblock_copy_damaged", None, damaged, "the other copy is sound")
            if self._repair:
                write_superblock(path, self._folder.superblock)
                self.checked.repaired += 1

    def _check_region(self, number: int) -> None:
        before = len(self.checked.problems)
        try:
            report = self._folder.inspect(number)
            if report.is_changing:
                self.checked.regions["in_use"] += 1
                return
            self.checked.regions[report.case] += 1
            self._judge(report)
            bad = self._check_blocks(report)
            found = len(self.checked.problems) - before
            if found and self._repair:
                self._drop(report, bad)
                self.checked.repaired += found
            self._folder.files.forget_cached(number)
        except PermissionError:
            raise
        except OSError as problem:
            self._found("region_unreadable", number, 1, str(problem.strerror or problem))

    def _drop(self, report: RegionReport, bad: set[int]) -> None:
        """Remove the unsound data of a region, or all of it if its header is unsound."""
        if report.case == "region_unreadable" or report.is_truncated:
            self._folder.files.cut(report.number)
        else:
            scrub_region(self._folder.files, report, lambda entry: entry.slot not in bad)

    def _judge(self, report: RegionReport) -> None:
        """Record the problems of a region's header and its table."""
        number = report.number
        if report.case not in UNREMARKABLE:
            self._found(report.case, number, 1, "all of the region")
        if report.is_truncated:
            self._found("table_truncated", number, 1, "its file ends within its table")
        cases = Counter(page.case for page in report.pages if page.case not in UNREMARKABLE)
        for case, count in cases.items():
            self._found(case, number, count, f"{count} table pages")
        beyond = sum(page.beyond for page in report.pages)
        if beyond:
            self._found("entries_beyond", number, beyond, f"{beyond} entries")

    # --- blocks ---

    def _check_blocks(self, report: RegionReport) -> set[int]:
        """Check all blocks of a region; return the slots of damaged ones."""
        entries = report.entries
        header = report.header
        if header is None or not entries:
            return set()
        is_encrypted = header.key_id != NO_KEY_ID
        if is_encrypted and (self._keyring is None or header.key_id not in self._keyring.by_id):
            self.checked.blocks_unverified += len(entries)
            return set()
        bad = self._bad_blocks(report, entries)
        if bad:
            bad = self._still_bad(report, bad)
        self.checked.blocks += len(entries) - len(bad)
        for case in sorted(set(bad.values())):
            slots = sorted(slot for slot in bad if bad[slot] == case)
            more = ", ..." if len(slots) > SLOTS_SHOWN else ""
            shown = ", ".join(map(str, slots[:SLOTS_SHOWN]))
            self._found(case, report.number, len(slots), f"in slots {shown}{more}")
        return set(bad)

    def _still_bad(self, report: RegionReport, bad: Mapping[int, str]) -> dict[int, str]:
        """Return the slots that are still bad, and were not replaced or removed meanwhile."""
        self._folder.files.forget_cached(report.number)
        again = self._folder.inspect(report.number)
        same = again.header == report.header and not again.is_changing
        before, now = report.entries, again.entries if same else {}
        there = {slot: before[slot] for slot in bad if now.get(slot) == before[slot]}
        skipped = len(bad) - len(there)
        self.checked.blocks_skipped += skipped
        self.checked.blocks -= skipped  # the caller counts them as sound
        return self._bad_blocks(report, there)

    def _bad_blocks(self, report: RegionReport, entries: Mapping[int, Entry]) -> dict[int, str]:
        """Read these blocks of a region; return the slots of bad ones, and their cases."""
        header = report.header
        assert header is not None, "entries without a header"
        bad = {}
        for slot, block in self._read(report, entries):
            if len(block) < header.block_bytes:
                bad[slot] = "blocks_truncated"
            elif not self._is_sound(header, entries[slot], block):
                bad[slot] = "blocks_damaged"
        return bad

    def _read(
        self, report: RegionReport, entries: Mapping[int, Entry]
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield the blocks of these slots, neighbours from one read."""
        header, geometry = report.header, report.geometry
        if header is None or geometry is None:
            return
        stride = geometry.stride
        for first, count in _runs(sorted(entries), max(1, READ_BYTES_MAX // stride)):
            raw = self._folder.files.read(report.number, geometry.slot_at(first), count * stride)
            self.checked.bytes_read += len(raw)
            view = memoryview(raw)
            for step in range(count):
                yield first + step, view[step * stride :][: header.block_bytes]

    def _is_sound(self, header: RegionHeader, entry: Entry, block: memoryview) -> bool:
        """Return whether a block's digest, and its tag if it has one, match."""
        digest = entry.digest
        if header.key_id != NO_KEY_ID:
            decrypted = self._decrypt(header, entry, block)
            if decrypted is None:
                return False
            block, digest = decrypted
        return block_digest(entry.key, block) == digest

    def _decrypt(
        self, header: RegionHeader, entry: Entry, block: memoryview
    ) -> tuple[memoryview, bytes] | None:
        """Decrypt a block; None if its tag is broken."""
        assert self._keyring is not None, "the caller has looked for the key"
        kind = (header.namespace, header.block_bytes)
        cipher = self._ciphers.get(kind)
        if cipher is None:
            cipher = self._ciphers[kind] = BlockCipher(self._keyring, *kind)
        if len(entry.tag) != TAG_BYTES:
            return None
        memory = cipher.borrow()
        memory[: len(block)] = block
        plain = memoryview(bytearray(len(block)))
        encrypted = EncryptedBlock(entry.key, header.key_id, entry.tag, entry.digest)
        digest = cipher.decrypt(memory, encrypted, plain)
        cipher.give_back(memory)
        return None if digest is None else (plain, digest)

    def _found(self, case: str, region: int | None, size: int, what: str) -> None:
        self.checked.problems.append(Problem(case, region, size, what))


def folder_damaged(path: str, *, repair: bool) -> Checked:
    """Report a folder without a sound superblock; with ``repair``, remove its remains.

    ``repair`` needs the folder to be claimed. Raises ``OSError``.
    """
    what = "no copy of the superblock is sound, so nothing in the folder is served"
    user = None if repair else user_of(path)
    checked = Checked(user, problems=[Problem("folder_damaged", None, 1, what)])
    if repair:
        _remove_remains(path)
        checked.repaired = 1
    return checked


def _remove_remains(path: str) -> None:
    names = [SEGMENT_NAME.format(number) for number in segment_numbers(path)]
    for name in [*names, "superblock"]:
        with suppress(FileNotFoundError):
            os.unlink(f"{path}/{name}")


def _runs(slots: list[int], length_max: int) -> Iterator[tuple[int, int]]:
    """Yield runs of neighbouring slots, as first and count."""
    first = count = 0
    for slot in slots:
        if count and (slot != first + count or count == length_max):
            yield first, count
            count = 0
        if not count:
            first = slot
        count += 1
    if count:
        yield first, count
