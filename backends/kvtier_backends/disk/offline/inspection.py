"""Inspects a disk tier's folder from outside, even while an engine uses it. Changes nothing.

Regions and pages are judged by recovery's cases, as an engine of the region's own
namespace would judge them. A running engine replaces table pages and
regions under the reader: data that looks damaged is read again, and is reported as
damaged only if it has stayed the same.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import ConfigError
from kvtier.plugin_api.offline import unreadable
from kvtier_backends.disk.device import Segments
from kvtier_backends.disk.folder.claim import (
    not_ours,
    read_superblock,
    segment_numbers,
)
from kvtier_backends.disk.folder.recovery import UNREMARKABLE, Expected, page_case, region_case
from kvtier_backends.disk.folder.users import LOCK_NAME, User, user_untrusted
from kvtier_backends.disk.format import (
    PAGE_BYTES,
    Entry,
    PageRefused,
    Refusal,
    RegionGeometry,
    RegionHeader,
    Superblock,
    decode_header_untrusted,
    decode_superblock_untrusted,
    entries_untrusted,
)
from kvtier_backends.disk.offline.region_files import RegionFiles
from kvtier_backends.disk.opened_files import NotAFile, open_file
from kvtier_backends.posix import check_folder, unusable

if TYPE_CHECKING:
    from typing import Self

INSPECTIONS_MAX: Final = 5
INSPECT_AGAIN_S: Final = 0.02
_NO_GEOMETRY: Final = RegionGeometry(0, -1, -1, -1, -1, -1)  # no header has it


class FolderDamaged(ConfigError):
    """Raised when both copies of a superblock are damaged. An engine would start empty there."""


class Page(NamedTuple):
    """One table page of a region, as found."""

    place: int  #: counted from the first table page
    case: str
    raw: bytes
    entries: list[Entry]
    beyond: int  #: entries that no slot can have


@dataclass
class RegionReport:
    """One region, as found. ``case`` and those of its pages are recovery's."""

    number: int
    case: str
    header: RegionHeader | None = None
    geometry: RegionGeometry | None = None
    pages: list[Page] = field(default_factory=list)
    is_truncated: bool = False  #: its file ends within its table
    is_changing: bool = False  #: an engine is changing it: it may look damaged and not be

    @property
    def is_sound(self) -> bool:
        """Return whether its header is sound, so that an engine of its namespace would serve it."""
        return self.case == "region_sound"

    @cached_property
    def entries(self) -> dict[int, Entry]:
        """Its blocks by slot. A slot has one entry in an incarnation."""
        return {entry.slot: entry for page in self.pages for entry in page.entries}

    @property
    def looks_damaged(self) -> bool:
        """Return whether an engine would count anything here."""
        pages = (page.case not in UNREMARKABLE or page.beyond > 0 for page in self.pages)
        return self.case not in UNREMARKABLE or self.is_truncated or any(pages)


class Folder:
    """A disk tier's folder and its files. One thread at a time; all methods block."""

    def __init__(self, path: str, *, writable: bool = False) -> None:
        """Raises ``ConfigError`` if it is not such a folder, and ``FolderDamaged``."""
        self.path = os.path.abspath(path)
        self.superblock = _superblock_of(self.path)
        segments = Segments(
            self.path, self.superblock.region_bytes, self.superblock.segment_regions
        )
        self.files = RegionFiles(segments, writable=writable)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()

    def inspect(self, number: int) -> RegionReport:
        """Inspect a region, repeatedly if needed. Raises ``OSError``."""
        found, raw = self._inspect_once(number)
        for _ in range(INSPECTIONS_MAX):
            if not found.looks_damaged:
                return found
            time.sleep(INSPECT_AGAIN_S)
            self.files.forget_cached(number)
            before = raw
            found, raw = self._inspect_once(number)
            if raw == before:
                return found
        found.is_changing = found.looks_damaged
        return found

    def _inspect_once(self, number: int) -> tuple[RegionReport, bytes]:
        """Return the region, and the bytes that it was judged by."""
        page = self.files.read(number, 0, PAGE_BYTES)
        header, geometry = self._layout_untrusted(page)
        raw = page
        if geometry is not None:  # again, in one read with its table
            raw = self.files.read(number, 0, geometry.slots_at)
            page = raw[:PAGE_BYTES]
            header, geometry = self._layout_untrusted(page)
        expected = Expected(
            self.superblock.folder_id,
            b"" if header is None else header.namespace,
            () if header is None else (header.key_id,),
            geometry or _NO_GEOMETRY,
        )
        case, _ = region_case(page, number, expected)
        found = RegionReport(number, case.name, header, geometry)
        if found.is_sound and header is not None and geometry is not None:
            found.is_truncated = len(raw) < geometry.slots_at
            for place in range((min(len(raw), geometry.slots_at) // PAGE_BYTES) - 1):
                at = (1 + place) * PAGE_BYTES
                found.pages.append(_judge_page(place, raw[at : at + PAGE_BYTES], header))
        return found, raw

    def _layout_untrusted(self, page: bytes) -> tuple[RegionHeader | None, RegionGeometry | None]:
        """Return the header, and the region's geometry if that is valid."""
        try:
            header = decode_header_untrusted(page)
        except PageRefused:
            return None, None
        geometry = RegionGeometry(
            self.superblock.region_bytes,
            header.block_bytes,
            header.stride,
            header.slots,
            header.table_pages,
            own_page_slots=header.slots + 1,  # nothing is appended to it here
        )
        fits = 0 < header.block_bytes <= header.stride
        fits = fits and header.stride % PAGE_BYTES == 0
        fits = fits and geometry.slot_at(header.slots) <= geometry.region_bytes
        return header, geometry if fits else None


def damaged_copies(path: str) -> int:
    """Count the copies of the folder's superblock that fail their checks. Raises ``OSError``."""
    with os.fdopen(open_file(f"{path}/superblock", os.O_RDONLY), "rb") as file:
        raw = file.read(2 * PAGE_BYTES)
    damaged = 0
    for at in (0, PAGE_BYTES):
        try:
            decode_superblock_untrusted(raw[at : at + PAGE_BYTES])
        except PageRefused:
            damaged += 1
    return damaged


def user_of(path: str) -> User | None:
    """Return the folder's current user, None if it is not claimed. Raises ``OSError``."""
    try:
        descriptor = open_file(f"{path}/{LOCK_NAME}", os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        # Held for an instant only: an engine that starts just then would be refused.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return user_untrusted(descriptor)
    else:
        return None
    finally:
        os.close(descriptor)


def refuse_folder(path: str, where: str, *, allow_world_writable: bool) -> None:
    """Raise ``ConfigError`` if an engine can't claim the folder now. ``where``: text start."""

    def refuse(fault: str) -> ConfigError:
        return ConfigError(f"{where} {fault}")

    check_folder(path, refuse, allow_world_writable=allow_world_writable)
    try:
        user = user_of(path)
    except NotAFile as problem:
        raise refuse(not_ours(problem)) from None
    except OSError as problem:
        raise refuse(unusable(problem, "cannot be read")) from problem
    if user is not None:
        raise refuse(
            f"is in use by {user}: stop that first, or name another folder."
        ) from BlockingIOError(errno.EAGAIN, "another engine has its lock")


def _superblock_of(path: str) -> Superblock:
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise ConfigError(f"{path} is not a folder. Name the path of a disk tier.")
        return read_superblock(path)
    except PageRefused as refused:
        if refused.refusal is Refusal.OTHER_VERSION:
            raise ConfigError(
                f"{path} was written by another version of kvtier ({refused}). Use that version."
            ) from None
        if not (os.path.lexists(f"{path}/superblock") or segment_numbers(path)):
            raise ConfigError(
                f"{path} is no folder of a disk tier: it has no superblock. Name the tier's path."
            ) from None
        raise FolderDamaged(
            f"{path}: its superblock is damaged or gone, so nothing in the folder is served. "
            "An engine starts with an empty folder there; kvtier fsck --repair removes the remains."
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} does not exist. Name the path of a disk tier.") from None
    except OSError as problem:
        raise unreadable(path, problem) from problem


def _judge_page(place: int, raw: bytes, header: RegionHeader) -> Page:
    case, table = page_case(raw, header.incarnation)
    entries = [] if table is None else list(entries_untrusted(table, header.slots))
    beyond = 0 if table is None else table.entries - len(entries)
    return Page(place, case.name, raw, entries, beyond)
