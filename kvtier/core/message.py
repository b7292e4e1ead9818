"""What every message is, and the values that most of them carry."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import msgspec

Key: TypeAlias = bytes
GROUP_BYTES: Final = 4
"""The last bytes of a key: the KV-cache group's index, big-endian. Each group is a chain."""

RequestId: TypeAlias = str
TierSet: TypeAlias = int


class OrderTold(NamedTuple):
    """A request's keys by token position, from number ``first`` on; those before are known."""

    first: int
    keys: tuple[Key, ...]


class Message(msgspec.Struct, frozen=True, gc=False, tag=True, array_like=True):
    """What all messages are. Their class's name is sent along where they go to another process."""
