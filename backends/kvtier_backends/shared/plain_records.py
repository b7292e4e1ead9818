"""A block as it lies in shared storage: its bytes, and a trailer that says what they should be.

The bytes may be compressed; what signs or encrypts them (``protected_records``) covers what is
stored. The digest is the block's own.
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
    """A block as it is to be stored: both, one behind the other."""

    payload: memoryview  #: ``block_bytes`` long, less if it is compressed
    trailer: bytes


class Records:
    """Makes records of blocks, and blocks of records. Any thread may call any method.

    These are neither signed nor encrypted: whoever can write to the storage can plant blocks.
    """

    form: ClassVar = Form.PLAIN

    def __init__(self, context: BackendContext, compressor: BlockCompressor | None = None) -> None:
        self._block_bytes = context.block_bytes
        self._compressor = compressor
        self._counters = TierCounters()
        self.context = context if compressor is None else compressed_namespace(context)
        """What names and descriptions of the namespace are made from: how blocks are protected and
        compressed is among its facts, so that engines that differ in it never share a name."""

    @property
    def are_compressed(self) -> bool:
        """Whether they are of several lengths: ``record_bytes`` is the largest."""
        return self._compressor is not None

    @property
    def are_plain(self) -> bool:
        """Whether a payload is the block itself: then it may be read into the slot at once."""
        return not self.are_compressed

    @property
    def are_cheap(self) -> bool:
        """Whether a record takes a microsecond to make. Else it belongs into ``RecordThreads``."""
        return self.form is Form.PLAIN and not self.are_compressed

    def trailer_bytes(self, key: bytes) -> int:
        """Return how long the trailer of this key's block is."""
        return trailer_bytes(key, self.form)

    def record_bytes(self, key: bytes) -> int:
        """Return how long the record of this key's block is, at most."""
        return self._block_bytes + self.trailer_bytes(key)

    def is_record_length(self, key: bytes, size: int) -> bool:
        """Tell whether a record of this key's block may be so long."""
        return self.is_payload_length(size - self.trailer_bytes(key))

    def is_payload_length(self, size: int) -> bool:
        """Tell whether a payload may be so long."""
        if size == self._block_bytes:
            return True
        return self._compressor is not None and self._compressor.is_compressed_length(size)

    def counts(self) -> Mapping[str, int]:
        """Return ``unauthenticated``: records that no key of ours vouches for. 0 is left out.

        With compression also the bytes of blocks that were to be stored, and of their payloads.
        """
        return self._counters.counts()

    def encode(self, block: StoreBlock) -> Record:
        """Return the record of a block. ``payload`` may be the block's buffer, or to be given back.

        It is page-aligned where it is not the buffer.
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
        """Return where to read the payload of a block to that belongs into ``buffer``.

        That is ``buffer`` itself where payloads are plain. Else it is page-aligned memory of the
        same length, as is the payload that ``encode`` makes.
        """
        return buffer if self._compressor is None else self._compressor.borrow()

    def give_back(self, payload: memoryview) -> None:
        """Keep a payload's memory for the next one. Nobody reads or writes it any more.

        For payloads of ``encode`` and ``room_for``. After a call that was cancelled or that raised
        somebody may still be at it: then leave it, and it goes with the last who has it.
        """
        if self._compressor is not None:
            self._compressor.give_back(payload)

    def decode_untrusted(
        self, key: bytes, payload: memoryview, trailer: bytes | memoryview, buffer: memoryview
    ) -> Loaded:
        """Bring the block of a record into ``buffer``, which may be ``payload`` itself.

        Raises nothing: what is torn, foreign, another key's, or not vouched for is DAMAGED.
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
        """Return the record of what is to be stored, which may be the payload itself."""
        return Record(payload, encode_trailer(key, self._block_bytes, trailer))

    def _open_untrusted(
        self, key: bytes, payload: memoryview, trailer: Trailer, buffer: memoryview
    ) -> bytes | None:
        """Bring what was protected into ``buffer``, which is as long as the payload.

        Returns the block's digest, None if nobody vouches for it.
        """
        del key
        if payload is not buffer:
            buffer[:] = payload
        return trailer.digest
