"""Defines messages to the primary tier about requests with keys in several KV-cache groups.

Like those in ``kvtier/core/messages.py``, but they never leave the engine cell.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from kvtier.core.messages import Lookup, Message
from kvtier.plugin_api.keys import Key, RequestId  # noqa: TC001 - msgspec decodes by them


class GroupKeys(NamedTuple):
    """One group's share of the blocks that a request may load, from head to tail."""

    keys: tuple[Key, ...]
    ends: tuple[int, ...]  #: the token that each block ends at, growing
    window: int | None = None  #: how many blocks before a token are needed; None: all of them
    reach: int = 0  #: with a window: at least so many tokens before it are needed
    beyond: int = 0  #: how many blocks behind it are needed, too

    def needed(self, tokens: int) -> tuple[Key, ...] | None:
        """Return the blocks needed for a prefix of ``tokens``; None if there is no such prefix."""
        last = bisect_left(self.ends, tokens)
        if last + self.beyond >= len(self.ends):
            return None
        first = 0
        if self.window is not None:
            first = max(
                0, min(last + 1 - self.window, bisect_right(self.ends, tokens - self.reach))
            )
        return self.keys[first : last + self.beyond + 1]


class Survey(Lookup, frozen=True, gc=False):
    """Where is this block? FILLING if a tier has it; the lookup alone does not promote it."""


class ReservePrefix(Message, frozen=True, gc=False):
    """Promote the blocks of the longest prefix that has room. Answered with its tokens, or 0."""

    groups: tuple[GroupKeys, ...]
    request: RequestId
    first_token: int | None = None  #: those before it the GPU has; None: whatever tiers have counts
    now: float = 0.0  #: set with ``first_token``
