"""Defines the names of a block, a request and a set of tiers, and the limit of a block's key."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

Key: TypeAlias = bytes
"""Key of a block: vLLM's hash of the prefix, perhaps a generation's mark, and ``GROUP_BYTES``."""

GROUP_BYTES: Final = 4
"""The last bytes of a key: the KV-cache group's index, big-endian. Each group is a chain."""

MARK_BYTES: Final = 24
"""Additional length of keys of later weight generations: ``kvtier/core/generations.py``."""

UNNAMED_MARK: Final = b"\xffkvtier?"
"""Begins the mark of a generation of unnamed weights."""

RequestId: TypeAlias = str
"""vLLM's name for a request; unique among the running ones."""

TierSet: TypeAlias = int
"""One bit per tier, in the order of ``secondary_tiers``; the lowest is the first tier's."""

K = TypeVar("K")


def forget_oldest(keys: dict[K, Any], keys_max: int) -> None:
    """Delete the oldest keys of a dict that has more than ``keys_max``, a share of them at once.

    To find a dict's first key takes as long as many were deleted before it: one by one, a key of a
    million takes a millisecond.
    """
    if (excess := len(keys) - keys_max) > 0:
        for key in list(islice(keys, excess + (keys_max >> 6))):
            del keys[key]


def is_unnamed(key: Key) -> bool:
    """Return whether a backend's key belongs to unnamed weights.

    Only the engine that stored such a block finds it, until its weights change again or it ends.
    """
    return len(key) > MARK_BYTES and key.startswith(UNNAMED_MARK, mark_start(key))


def mark_start(key: Key) -> int:
    """Return where a mark begins, if there is one; a key may be shorter than a group's index."""
    return max(0, len(key) - GROUP_BYTES - MARK_BYTES)
