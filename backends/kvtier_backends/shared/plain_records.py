"""Encodes a block for shared storage: its bytes, and a trailer that describes them.

The bytes may be compressed; signatures and encryption (``protected_records``) cover the stored
bytes. The digest is the block's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvtier.plugin_api.backend import Loaded, Outcome
from kvtier_backends.incidents import TierCounters
from kvtier_backends.shared.compression import compressed_namespace
from kvtier_backends.shared.record_trailer import (
    Coding,
    Form,
    Trailer,
    decode_trailer_untrusted,
    encode_trailer,
    trailer_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plugin_api.backend import BackendContext, StoreBlock
    from kvtier_backends.shared.compression import BlockCompressor


class Record(NamedTuple):
    """A block as it is stored: the payload, followed by the trailer."""

    payload: memoryview  #: ``block_bytes`` long, less if it is compressed
    trailer: bytes


class Records:
    """Encodes blocks as records, and decodes records. Any thread may call any method.

    These are neither signed nor encrypted: anyone who can write to the storage can plant blocks.
    """

    form: ClassVar = Form.PLAIN

    def __init__(self, context: BackendContext, compressor: BlockCompressor | None = None) -> None:
        self._block_bytes = context.block_bytes
        self._compressor = compressor
        self._counters = TierCounters()
        self.context = context if compressor is None else compressed_namespace(context)
        """Source of the namespace's name and description: how blocks are protected and compressed
        is among its facts, so that engines that differ in it never share a name."""

    @property
    def are_compressed(self) -> bool:
        """Whether records differ in length: ``record_bytes`` is the largest."""
        return self._compressor is not None

    @property
    def are_plain(self) -> bool:
        """Whether a payload is the block itself: then it may be read directly into the slot."""
        return not self.are_compressed

    @property
    def are_cheap(self) -> bool:
        """Whether a record takes a microsecond to make. If not, it belongs in ``RecordThreads``."""
        return self.form is Form.PLAIN and not self.are_compressed

    def trailer_bytes(self, key: bytes) -> int:
        """Return the length of the trailer of this key's block."""
        return trailer_bytes(key, self.form)

    def record_bytes(self, key: bytes) -> int:
        """Return the maximum length of the record of this key's block."""
        return self._block_bytes + self.trailer_bytes(key)

    def is_record_length(self, key: bytes, size: int) -> bool:
        """Return whether a record of this key's block may have this length."""
        return self.is_payload_length(size - self.trailer_bytes(key))

    def is_payload_length(self, size: int) -> bool:
        """Return whether a payload may have this length."""
        if size == self._block_bytes:
            return True
        return self._compressor is not None and self._compressor.is_compressed_length(size)

    def counts(self) -> Mapping[str, int]:
        """Return ``unauthenticated``: records that none of our keys authenticates. 0 is left out.

        With compression, also the bytes of blocks to be stored, and of their payloads.
        """
        return self._counters.counts()

    def encode(self, block: StoreBlock) -> Record:
        """Return a block's record. ``payload`` may be the block's buffer; if not, give it back.

        It is page-aligned if it is not the buffer.
        """
        trailer = Trailer(self.form, block.digest)
        if self._compressor is None:
            return self._protect(block.key, block.buffer, trailer)
        memory = self._compressor.borrow()
        size = self._compressor.compress(block.buffer, memory)
        if size is None:
            size = self._block_bytes
            memory[:] = block.buffer
        else:
            trailer = trailer._replace(coding=Coding.BITPLANE_ZSTD)
        self._counters.add("compression_bytes_in", self._block_bytes)
        self._counters.add("compression_bytes_out", size)
        payload = memory[:size]
        record = self._protect(block.key, payload, trailer)
        if record.payload is not payload:
            self._compressor.give_back(memory)
        return record

    def room_for(self, buffer: memoryview) -> memoryview:
        """Return the memory for reading the payload of a block that belongs in ``buffer``.

        That is ``buffer`` itself if payloads are plain. Otherwise it is page-aligned memory of
        the same length, as is the payload that ``encode`` makes.
        """
        return buffer if self._compressor is None else self._compressor.borrow()

    def give_back(self, payload: memoryview) -> None:
        """Keep a payload's memory for the next one. Nothing may read or write it any more.

        For payloads of ``encode`` and ``room_for``. After a call that was cancelled or raised, it
        may still be in use: then drop it, and it is freed with its last reference.
        """
        if self._compressor is not None:
            self._compressor.give_back(payload)

    def decode_untrusted(
        self, key: bytes, payload: memoryview, trailer: bytes | memoryview, buffer: memoryview
    ) -> Loaded:
        """Decode the block of a record into ``buffer``, which may be ``payload`` itself.

        Raises nothing: a torn, foreign or unauthenticated record, or another key's, is DAMAGED.
        """
        found = decode_trailer_untrusted(bytes(trailer), key, self._block_bytes)
        if found is None or not self._is_length_of(found.coding, payload.nbytes):
            return Loaded(Outcome.DAMAGED)
        if found.form is not self.form:
            self._counters.add("unauthenticated")
            return Loaded(Outcome.DAMAGED)
        if found.coding is Coding.BITPLANE_ZSTD:
            return self._decompress_untrusted(key, payload, found, buffer)
        return self._opened(self._open_untrusted(key, payload, found, buffer))

    def _is_length_of(self, coding: Coding, size: int) -> bool:
        if coding is Coding.RAW:
            return size == self._block_bytes
        return self._compressor is not None and self._compressor.is_compressed_length(size)

    def _decompress_untrusted(
        self, key: bytes, payload: memoryview, trailer: Trailer, buffer: memoryview
    ) -> Loaded:
        compressor = self._compressor
        assert compressor is not None  # _is_length_of
        memory = compressor.borrow()
        room = memory[: payload.nbytes]
        loaded = self._opened(self._open_untrusted(key, payload, trailer, room))
        is_sound = loaded.outcome is Outcome.DONE and compressor.decompress_untrusted(room, buffer)
        compressor.give_back(memory)
        return loaded if is_sound else Loaded(Outcome.DAMAGED)

    def _opened(self, digest: bytes | None) -> Loaded:
        if digest is None:
            self._counters.add("unauthenticated")
            return Loaded(Outcome.DAMAGED)
        return Loaded(Outcome.DONE, digest)

    def _protect(self, key: bytes, payload: memoryview, trailer: Trailer) -> Record:
        """Return the record to store, which may contain the payload itself."""
        return Record(payload, encode_trailer(key, self._block_bytes, trailer))

    def _open_untrusted(
        self, key: bytes, payload: memoryview, trailer: Trailer, buffer: memoryview
    ) -> bytes | None:
        """Verify or decrypt the payload into ``buffer``, which is as long as the payload.

        Returns the block's digest, None if it is not authenticated.
        """
        del key
        if payload is not buffer:
            buffer[:] = payload
        return trailer.digest
