"""Encodes a block and its trailer page for a file: plain, or as a record.

A plain block has the trailer of ``kvtier_backends/fs/trailer.py``, as do the
files of vLLM's layout. A block that is compressed, signed or encrypted has the
trailer of all shared storage, and zeros up to the end of the page. A compressed block takes
whole pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.backend import Outcome
from kvtier_backends.fs.trailer import (
    TRAILER_BYTES,
    TrailerDamaged,
    decode_trailer_untrusted,
    encode_trailer,
)
from kvtier_backends.shared.record_trailer import Form

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import LoadBlock, StoreBlock
    from kvtier_backends.shared.records import Records


class BlockRefused(StoreFault):
    """Raised if a block and its trailer don't match. Don't drop the file for that alone.

    Once a call is cancelled, its buffer may no longer belong to it: the tier, which knows
    that, has the block removed.
    """


class PlainForm:
    """The block itself, with its checksum. Any thread may call any method."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes

    def is_payload_length(self, size: int) -> bool:
        """Return whether the data before the trailer page may have this size, without padding."""
        return size == self.block_bytes

    def room_for(self, buffer: memoryview) -> memoryview:
        """Return the memory to read the file's data into."""
        return buffer

    def give_back(self, payload: memoryview) -> None:
        """Note that a payload is no longer read or written."""

    def encode(self, block: StoreBlock, page: memoryview) -> memoryview:
        """Write the trailer page, and return the data to write before it. Raises ``Misuse``."""
        page[:] = encode_trailer(block.key, self.block_bytes, block.digest)
        return block.buffer

    def decode_untrusted(self, block: LoadBlock, payload: memoryview, page: memoryview) -> bytes:
        """Decode a payload into the block's buffer; return its digest.

        Raises ``TrailerDamaged`` and nothing else.
        """
        del payload  # the buffer itself
        return decode_trailer_untrusted(page, block.key, self.block_bytes)


class RecordForm:
    """A record, as in other shared storage. Any thread may call any method."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.block_bytes = records.context.block_bytes
        self.is_payload_length = records.is_payload_length
        self.room_for = records.room_for
        self.give_back = records.give_back

    def encode(self, block: StoreBlock, page: memoryview) -> memoryview:
        """Write the trailer page, and return the data to write before it. Raises ``Misuse``."""
        size = self._records.trailer_bytes(block.key)
        if size > TRAILER_BYTES:
            raise Misuse(f"a key of {len(block.key)} bytes has no room in a page. Shorten the key.")
        payload, trailer = self._records.encode(block)
        page[:] = trailer.ljust(TRAILER_BYTES, b"\0")
        return payload

    def decode_untrusted(self, block: LoadBlock, payload: memoryview, page: memoryview) -> bytes:
        """Decode a payload into the block's buffer; return its digest.

        Raises ``TrailerDamaged`` and ``BlockRefused``, and nothing else.
        """
        size = self._records.trailer_bytes(block.key)
        if bytes(page[size:]).strip(b"\0"):
            raise TrailerDamaged("there is more in the trailer's page than a trailer")
        trailer = page[:size]
        outcome, digest = self._records.decode_untrusted(block.key, payload, trailer, block.buffer)
        if outcome is not Outcome.DONE or digest is None:
            raise BlockRefused("it is torn, or no key of this tier's vouches for it")
        return digest


def make_form(records: Records) -> PlainForm | RecordForm:
    """Return the form in which files are written and read."""
    if records.form is Form.PLAIN and not records.are_compressed:
        return PlainForm(records.context.block_bytes)
    return RecordForm(records)
