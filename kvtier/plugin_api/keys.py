"""What names a block, a request and a set of tiers, and how long a block's key may get."""

from __future__ import annotations

from typing import Final, TypeAlias

Key: TypeAlias = bytes
"""Of a block: vLLM's hash of the prefix, perhaps the mark of a generation, and ``GROUP_BYTES``."""

GROUP_BYTES: Final = 4
"""The last bytes of a key: the KV-cache group's index, big-endian. Each group is a chain."""

MARK_BYTES: Final = 24
"""By so much keys of later generations of weights are longer: ``kvtier/core/generations.py``."""

UNNAMED_MARK: Final = b"\xffkvtier?"
"""Begins the mark of a generation of weights that have no name."""

RequestId: TypeAlias = str
"""vLLM's name for a request; unique among the running ones."""

TierSet: TypeAlias = int
"""One bit a tier, in the order of ``secondary_tiers``; the lowest is the first tier's."""


def is_unnamed(key: Key) -> bool:
    """Tell whether a backend's key is of weights without a name.

    Only the engine that stored such a block finds it, until its weights change again or it ends.
    """
    return len(key) > MARK_BYTES and key.startswith(UNNAMED_MARK, mark_start(key))


def mark_start(key: Key) -> int:
    """Return where a mark begins, if there is one; a key may be shorter than a group's index."""
    return max(0, len(key) - GROUP_BYTES - MARK_BYTES)
