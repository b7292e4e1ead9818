"""Compresses blocks of bfloat16 without loss: byte planes, and zstd for one of them.

A bfloat16 has a sign, 8 bits of exponent and 7 of mantissa. In keys and values the
mantissas are as good as random, and the exponents are few: the plane of the high
bytes (sign and exponent) shrinks to some 37 %, that of the low bytes does not. So a compressed
block is

    low bytes, as they are    half of the block
    high bytes                a zstd frame
    zeros                     up to a whole page, as O_DIRECT needs it

Nothing else helped: differences along the tokens, channels side by side, planes of single
bits, a higher zstd level. See docs/explanation/compression.md, with the figures.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier_backends.memory_pool import MemoryPool
from kvtier_backends.posix import PAGE_BYTES, padded_bytes

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import BackendContext

BITPLANE_ZSTD: Final = "bitplane-zstd"
COMPRESSION: Final = "compression"  #: the name of the option, and of the fact in such namespaces
_WORD: Final = np.dtype("<u2")
_ZSTD_LEVEL: Final = 1
_MATCH: Final = {"min_match": 7, "hash_log": 6}
"""zstd finds no repetitions in exponents that are worth their cost, so its search is restricted.
Compressing takes half the time, and saves a little more. zstd still finds long runs."""


class BlockCompressor:
    """Compresses and decompresses blocks of one length. Any thread may call any method."""

    def __init__(self, block_bytes: int) -> None:
        """Raises ``ImportError`` without the library. ``block_bytes``: an even number."""
        import zstandard  # noqa: PLC0415 - an extra

        self._library = zstandard
        self._plane_bytes = block_bytes // _WORD.itemsize
        self._block_bytes = block_bytes
        self._tools = _Tools(zstandard)
        self._pool = MemoryPool(block_bytes)

    def borrow(self) -> memoryview:
        """Return page-aligned memory for one block, to be given back."""
        return self._pool.borrow()[: self._block_bytes]

    def give_back(self, memory: memoryview) -> None:
        """Keep borrowed memory for the next block. Nothing may read or write it any more."""
        self._pool.give_back(memory)

    def is_compressed_length(self, size: int) -> bool:
        """Return whether a compressed block may have this length. An uncompressed one may not."""
        least = self._plane_bytes + 1
        return size % PAGE_BYTES == 0 and least <= size <= self._block_bytes - PAGE_BYTES

    def compress(self, block: memoryview, into: memoryview) -> int | None:
        """Write the compressed block to ``into``, which is as long as the block.

        Returns its length, None if that does not save a page.
        """
        plane = self._plane_bytes
        high = np.frombuffer(into, np.uint8)[plane : 2 * plane]
        np.copyto(high, np.frombuffer(block, np.uint8)[1::2])
        frame = self._tools.compressor.compress(into[plane : 2 * plane])
        end = plane + len(frame)
        size = padded_bytes(end)
        if not self.is_compressed_length(size):
            return None
        low = np.frombuffer(into, np.uint8)[:plane]
        np.copyto(low, np.frombuffer(block, _WORD), casting="unsafe")  # cuts the high bytes off
        into[plane:end] = frame
        into[end:size] = bytes(size - end)
        return size

    def decompress_untrusted(self, compressed: memoryview, block: memoryview) -> bool:
        """Decompress a block into its buffer; return False if it is invalid. Raises nothing.

        Takes at most half a block of memory, whatever the bytes are.
        """
        plane = self._plane_bytes
        frame = compressed[plane:]
        if not self.is_compressed_length(compressed.nbytes):
            return False
        try:
            # Before the library allocates the size that the frame claims.
            if self._library.frame_content_size(frame) != plane:
                return False
            high = self._tools.decompressor.decompress(frame, allow_extra_data=True)
        except self._library.ZstdError:
            return False
        if len(high) != plane:
            return False
        words = np.frombuffer(block, _WORD)
        np.copyto(words, np.frombuffer(high, np.uint8))
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, np.frombuffer(compressed, np.uint8, plane), out=words)
        return True


class _Tools(threading.local):
    """One thread's library objects, which no two threads may use at once."""

    def __init__(self, library: Any) -> None:  # noqa: ANN401 - loaded late
        of_level = library.ZstdCompressionParameters.from_level
        parameters = of_level(_ZSTD_LEVEL, write_content_size=True, **_MATCH)
        self.compressor = library.ZstdCompressor(compression_params=parameters)
        self.decompressor = library.ZstdDecompressor()


def compressed_namespace(context: BackendContext) -> BackendContext:
    """Return a context of another namespace, for blocks that may be compressed."""
    facts = {**context.namespace.facts, COMPRESSION: BITPLANE_ZSTD}
    return replace(context, namespace=replace(context.namespace, facts=facts))
