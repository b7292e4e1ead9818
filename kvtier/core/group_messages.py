"""Messages to the primary tier about requests whose keys belong to several KV-cache groups.

As those in ``kvtier/messages.py``; they never leave the engine cell.
"""

from __future__ import annotations

from kvtier.messages import Lookup, Message, RequestId
from kvtier.prefix_plan import GroupKeys  # noqa: TC001 - a field of a message


class Survey(Lookup, frozen=True, gc=False):
    """Where is this block? What a tier has is FILLING, and is not promoted for being asked for."""


class ReservePrefix(Message, frozen=True, gc=False):
    """Promote what the longest prefix needs that has room. Answered with its tokens, or 0."""

    groups: tuple[GroupKeys, ...]
    request: RequestId
