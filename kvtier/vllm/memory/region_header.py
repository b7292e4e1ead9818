"""Passes data from an engine's workers to its scheduler, in a header beside the slots.

vLLM gives the scheduler-side spec no model configuration and no channel to the
workers; the shared region is one. Its last bytes hold, for each worker rank, a flag
("I have mapped this") and the size of its part of a slot, and one JSON document, which
rank 0 publishes.

The same layout lies at the end of kvtier's own region (CPU platform) and in
the last rows of vLLM's (the others). Bytes start as zeros. Flags and parts have one
writer each, and are written once. The document has one writer; a reader
checks its length and CRC, so that it sees all of it or nothing.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from collections.abc import Mapping

HEADER_BYTES = 256 * 1024  #: room for the names of a few thousand layers
RANKS_MAX = 4096

_MAGIC = b"kvtier\x00\x01"
_DOCUMENT_HEAD = struct.Struct("<8sII")  # magic, length, CRC-32
_DOCUMENT_HEAD_AT = 0
_PART = struct.Struct("<Q")
_FLAGS_AT = 64
_PARTS_AT = 8192
_DOCUMENT_AT = _PARTS_AT + RANKS_MAX * _PART.size
DOCUMENT_BYTES_MAX = HEADER_BYTES - _DOCUMENT_AT


class RegionHeader:
    """Reads and writes the header in ``view``, which is shared by all processes. Any thread.

    Each flag, each part and the document have one writer.
    """

    def __init__(self, view: memoryview, world_size: int) -> None:
        if not 1 <= world_size <= RANKS_MAX:
            raise ConfigError(
                f"world_size={world_size} is outside 1..{RANKS_MAX}: an engine of this many "
                "workers cannot share one host region. Lower the tensor or pipeline parallel size."
            )
        if view.nbytes < HEADER_BYTES:
            raise InternalError(f"header has {view.nbytes} bytes, needs {HEADER_BYTES}")
        self._view = view.cast("B") if view.ndim != 1 or view.format != "B" else view
        self._flags = slice(_FLAGS_AT, _FLAGS_AT + world_size)
        self.world_size = world_size

    def mark_mapped(self, rank: int) -> bool:
        """Set the flag of ``rank``; False if it was set before."""
        if not 0 <= rank < self.world_size:
            raise InternalError(f"rank {rank} is outside 0..{self.world_size - 1}")
        first = self._view[_FLAGS_AT + rank] == 0
        self._view[_FLAGS_AT + rank] = 1
        return first

    def note_part(self, rank: int, part_bytes: int) -> None:
        """Publish how many bytes of a slot are this rank's."""
        _PART.pack_into(self._view, _PARTS_AT + rank * _PART.size, part_bytes)

    def parts(self) -> list[int]:
        """Return each rank's number of bytes in a slot; 0 for a rank that has not published it."""
        places = range(_PARTS_AT, _PARTS_AT + self.world_size * _PART.size, _PART.size)
        return [_PART.unpack_from(self._view, place)[0] for place in places]

    def mapped_ranks(self) -> int:
        """Return how many ranks have mapped the region."""
        return bytes(self._view[self._flags]).count(1)

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not mapped the region."""
        return [rank for rank, flag in enumerate(bytes(self._view[self._flags])) if not flag]

    def all_mapped(self) -> bool:
        """Return whether every worker has mapped the region."""
        return self.mapped_ranks() == self.world_size

    def publish(self, document: Mapping[str, Any]) -> None:
        """Write ``document``, which must consist of JSON values.

        Raises ``InternalError`` if it does not fit.
        """
        text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        if len(text) > DOCUMENT_BYTES_MAX:
            raise InternalError(
                f"the engine's facts take {len(text)} bytes of JSON, {DOCUMENT_BYTES_MAX} fit"
            )
        self._view[_DOCUMENT_AT : _DOCUMENT_AT + len(text)] = text
        # The head is written last: until then, a reader sees no document.
        head = _DOCUMENT_HEAD.pack(_MAGIC, len(text), zlib.crc32(text))
        self._view[_DOCUMENT_HEAD_AT : _DOCUMENT_HEAD_AT + len(head)] = head

    def read(self) -> dict[str, Any] | None:
        """Return the document, None while there is none (or half of one)."""
        magic, length, crc = _DOCUMENT_HEAD.unpack_from(self._view, _DOCUMENT_HEAD_AT)
        if magic != _MAGIC or length > DOCUMENT_BYTES_MAX:
            return None
        text = bytes(self._view[_DOCUMENT_AT : _DOCUMENT_AT + length])
        if zlib.crc32(text) != crc:
            return None
        document = json.loads(text)
        if not isinstance(document, dict):
            raise InternalError("the header's document is not a mapping")
        return document

    def release(self) -> None:
        """Release the buffer. Safe to call twice; nothing else works after it."""
        self._view.release()
