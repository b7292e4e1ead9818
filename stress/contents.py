"""The bytes that belong to a block: what every read is compared with.

They depend on the weights too, so that a block of a generation from before is told apart.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

BLOCK_BYTES: Final = 4096
CONVERSATIONS: Final = 16
CONVERSATION_BLOCKS: Final = 40


def key_of(conversation: int, block: int) -> bytes:
    """Name one block of one conversation, in KV-cache group 0."""
    return hashlib.sha256(f"{conversation}:{block}".encode()).digest() + bytes(4)


@lru_cache(maxsize=4 * CONVERSATIONS * CONVERSATION_BLOCKS)
def content_of(key: bytes, weights: str) -> bytes:
    """Return the bytes of a block that was computed with these weights."""
    return hashlib.shake_128(weights.encode() + b"\0" + key).digest(BLOCK_BYTES)


CONVERSATION_KEYS: Final = tuple(
    tuple(key_of(conversation, block) for block in range(CONVERSATION_BLOCKS))
    for conversation in range(CONVERSATIONS)
)
