"""Verifies the block files of a folder, and removes unsound ones.

Engines may be running meanwhile: a file that is gone by the time it is read or removed is skipped,
and one that is replaced while it is read is read to its end. Blocks without a checksum, such as
vLLM's own, are counted and not judged. The same holds for encrypted blocks, except for their
trailer, and for compressed ones if the library is missing. A signed block is compared with its
checksum; its signature is not checked, so no key is needed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.plugin_api.backend import block_digest
from kvtier_backends.fs.forms import TRAILER_BYTES, TrailerDamaged, decode_trailer_untrusted
from kvtier_backends.fs.layout import key_of_file_untrusted
from kvtier_backends.fs.offline.inspection import (
    BlockFile,
    are_compressed,
    block_bytes_of,
    form_of,
)
from kvtier_backends.posix import padded_bytes
from kvtier_backends.shared import record_trailer
from kvtier_backends.shared.compression import BlockCompressor
from kvtier_backends.shared.record_trailer import Coding, Form

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier_backends.fs.offline.inspection import FsFolder

PROBLEMS_MAX: Final = 10_000
"""Most problems that are listed; all of them are counted."""


class Problem(NamedTuple):
    """One unsound file."""

    case: str
    file: str  #: below the root
    what: str  #: for people


@dataclass
class Checked:
    """The results of a check."""

    blocks: int = 0  #: that passed
    unverified: int = 0  #: without a checksum, or under a name that does not yield the key
    skipped: int = 0  #: gone by the time they were read, or were to be removed
    bytes_read: int = 0
    cases: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    repaired: int = 0
    is_complete: bool = True


class _Unverified(Exception):
    """Raised for a file without a checksum."""


def check_folder(folder: FsFolder, advance: Callable[[], None], *, repair: bool) -> Checked:
    """Check all block files. Raises ``OSError``; Ctrl-C skips the rest."""
    checked = Checked()
    try:
        for file in folder.files(advance):
            if isinstance(file, BlockFile):
                _check(folder, file, checked, repair=repair)
    except KeyboardInterrupt:
        checked.is_complete = False
    return checked


def _check(folder: FsFolder, file: BlockFile, checked: Checked, *, repair: bool) -> None:
    try:
        raw = folder.read(file)
        if raw is None:
            checked.skipped += 1
            return
        checked.bytes_read += len(raw)
        _verify(file, raw, folder.namespaces.get(file.namespace, {}))
    except _Unverified:
        checked.unverified += 1
    except TrailerDamaged as problem:
        what = str(problem)
        try:
            if repair and not folder.remove(file):
                checked.skipped += 1
                return
            checked.repaired += repair
        except OSError as left:
            what = f"{what}; not removed: {left.strerror or left}"
        _found(file, "blocks_damaged", what, checked)
    except OSError as problem:
        _found(file, "blocks_unreadable", problem.strerror or str(problem), checked)
    else:
        checked.blocks += 1


def _found(file: BlockFile, case: str, what: str, checked: Checked) -> None:
    checked.cases[case] += 1
    if len(checked.problems) < PROBLEMS_MAX:
        checked.problems.append(Problem(case, file.path, what))


def _verify(file: BlockFile, raw: bytes, description: dict[str, Any]) -> None:
    """Raise ``TrailerDamaged`` if a file is unsound, ``_Unverified`` if it can't be checked."""
    key = key_of_file_untrusted(file.name)
    form, is_compressed = form_of(description), are_compressed(description)
    block_bytes = block_bytes_of(description)
    if block_bytes is not None and (is_compressed or form is not Form.PLAIN):
        _verify_record(raw, key, block_bytes, form)
        return
    is_kvtiers = block_bytes is not None
    if block_bytes is None:
        block_bytes = len(raw) - TRAILER_BYTES
    if block_bytes <= 0 or len(raw) != padded_bytes(block_bytes) + TRAILER_BYTES:
        if is_kvtiers:
            raise TrailerDamaged(f"torn: {len(raw)} bytes")
        raise _Unverified
    if key is None:
        raise _Unverified
    try:
        digest = decode_trailer_untrusted(raw[-TRAILER_BYTES:], key, block_bytes)
    except TrailerDamaged:
        if is_kvtiers:
            raise
        raise _Unverified from None  # vLLM's own: its last bytes are the block's
    if digest != block_digest(key, memoryview(raw)[:block_bytes]):
        raise TrailerDamaged("the block fails its checksum")


def _verify_record(raw: bytes, key: bytes | None, block_bytes: int, form: Form) -> None:
    """Do the same for a file that holds a record."""
    stored, page = memoryview(raw)[:-TRAILER_BYTES], raw[-TRAILER_BYTES:]
    if len(page) < TRAILER_BYTES:
        raise TrailerDamaged(f"torn: {len(raw)} bytes")
    if key is None:
        raise _Unverified
    size = record_trailer.trailer_bytes(key, form)
    found = record_trailer.decode_trailer_untrusted(page[:size], key, block_bytes)
    if found is None or found.form is not form or page[size:].strip(b"\0"):
        raise TrailerDamaged("the trailer is torn, or another block's")
    is_raw = found.coding is Coding.RAW
    if is_raw and len(stored) != padded_bytes(block_bytes):
        raise TrailerDamaged(f"torn: {len(raw)} bytes")
    if form is Form.ENCRYPTED:
        raise _Unverified
    block = stored[:block_bytes] if is_raw else _decompressed(stored, block_bytes)
    if found.digest != block_digest(key, block):
        raise TrailerDamaged("the block fails its checksum")


def _decompressed(stored: memoryview, block_bytes: int) -> memoryview:
    try:
        compressor = BlockCompressor(block_bytes)
    except ImportError:
        raise _Unverified from None
    # Check before a block is allocated: a wrong description may give a huge size.
    if compressor.is_compressed_length(len(stored)):
        block = memoryview(bytearray(block_bytes))
        if compressor.decompress_untrusted(stored, block):
            return block
    raise TrailerDamaged("the block can't be decompressed")
