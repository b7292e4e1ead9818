"""Messages to the primary tier about requests whose keys belong to several KV-cache groups.

As those in ``kvtier/core/messages.py``; they never leave the engine cell.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from kvtier.core.messages import Lookup, Message
from kvtier.plugin_api.keys import Key, RequestId  # noqa: TC001 - msgspec decodes by them


class GroupKeys(NamedTuple):
    """One group's part of what a request may load, from head to tail."""

    keys: tuple[Key, ...]
    ends: tuple[int, ...]  #: the token that each block ends at, growing
    window: int | None = None  #: how many blocks before a token are needed; None: all of them
    reach: int = 0  #: with a window: so many tokens before it are needed at least
    beyond: int = 0  #: how many blocks behind it are needed, too

    def needed(self, tokens: int) -> tuple[Key, ...] | None:
        """Return the blocks needed for a prefix of ``tokens``; None: there is no such prefix."""
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
    """Where is this block? What a tier has is FILLING, and is not promoted for being asked for."""


class ReservePrefix(Message, frozen=True, gc=False):
    """Promote what the longest prefix needs that has room. Answered with its tokens, or 0."""

    groups: tuple[GroupKeys, ...]
    request: RequestId
    first_token: int | None = None  #: those before it the GPU has; None: whatever tiers have counts
    now: float = 0.0  #: told with ``first_token``
