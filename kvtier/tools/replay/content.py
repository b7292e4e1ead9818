"""The keys of a trace's blocks, and the bytes that belong to a key.

A block is a ramp of 64-bit words that starts at a hash of its key. So every word of every block can
be computed, no two words of a block are equal, and a block that is shifted, torn, or mixed with
another block or an older one is detected.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import xxhash

from kvtier.errors import ConfigError
from kvtier.plugin_api.keys import GROUP_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

WORD_BYTES: Final = 8
_WORD_VALUES: Final = 1 << 64
_STRIDE: Final = 0x9E3779B97F4A7C15
"""Difference of consecutive words. Odd, so that words repeat only after 2**64 of them."""

_KV_CACHE_GROUP: Final = bytes(GROUP_BYTES)


def key_of(block: int) -> bytes:
    """Return the key of a trace's block: as long as vLLM's, in KV-cache group 0."""
    return hashlib.sha256(str(block).encode()).digest() + _KV_CACHE_GROUP


class WrongWord(NamedTuple):
    """The first word of a block that does not belong to its key."""

    block: int  #: its place among the checked blocks
    offset_bytes: int
    expected: int
    found: int


class BlockContent:
    """Makes and checks the bytes of blocks of one size, given as rows of words."""

    def __init__(self, block_bytes: int) -> None:
        if block_bytes < WORD_BYTES or block_bytes % WORD_BYTES:
            raise ConfigError(
                f"block_bytes={block_bytes!r} must be a multiple of {WORD_BYTES}: replay makes "
                "blocks out of whole words. Choose another size."
            )
        self.words = block_bytes // WORD_BYTES
        self._ramp: Words = np.arange(self.words, dtype=np.uint64) * np.uint64(_STRIDE)

    def fill(self, row: Words, key: bytes) -> None:
        """Write the bytes of ``key``."""
        np.add(self._ramp, np.uint64(xxhash.xxh3_64_intdigest(key)), out=row)

    def check(self, rows: Words, keys: Sequence[bytes]) -> list[WrongWord]:
        """Compare the rows with the bytes of ``keys``; the rows' contents are lost.

        Rows may be shorter than a block: then only its first words are checked.
        """
        seeds = np.array([xxhash.xxh3_64_intdigest(key) for key in keys], dtype=np.uint64)
        ramp = self._ramp[: rows.shape[1]]
        np.subtract(rows, ramp, out=rows)
        differs = rows != seeds[:, np.newaxis]
        if not differs.any():
            return []
        wrong = []
        for block in np.flatnonzero(differs.any(axis=1)):
            word = int(differs[block].argmax())
            wrong.append(
                WrongWord(
                    block=int(block),
                    offset_bytes=word * WORD_BYTES,
                    expected=(int(ramp[word]) + int(seeds[block])) % _WORD_VALUES,
                    found=(int(ramp[word]) + int(rows[block, word])) % _WORD_VALUES,
                )
            )
        return wrong
