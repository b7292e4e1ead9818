"""Defines the messages about cascades between primary tier, admission gates and a tier's link.

Like those in ``kvtier/core/messages.py``, but they never leave the engine cell.
"""

from __future__ import annotations

from kvtier.core.message import Message
from kvtier.plugin_api.keys import Key, RequestId  # noqa: TC001 - msgspec decodes by it


class Cascade(Message, frozen=True, gc=False):
    """Store these blocks, which are pinned once for this tier, from these slots.

    ``is_admitted``: the tier's admission policy has already decided.
    """

    request: RequestId
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    epoch: int
    is_admitted: bool = False

    def part(self, start: int, stop: int | None = None) -> Cascade:
        """Return a cascade of some of the blocks."""
        where = slice(start, stop)
        return Cascade(
            self.request, self.keys[where], self.slots[where], self.epoch, self.is_admitted
        )


class CascadeRefused(Message, frozen=True, gc=False):
    """The tier's admission policy doesn't want these blocks of a Cascade."""

    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    epoch: int


class CascadeWanted(Message, frozen=True, gc=False):
    """The tier's admission policy wants these now; ``request`` used them. They may be gone."""

    tier: int
    keys: tuple[Key, ...]
    request: RequestId


class CascadeEnded(Message, frozen=True, gc=False):
    """The tier no longer reads these slots."""

    tier: int
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    epoch: int


class CascadeDeferred(Message, frozen=True, gc=False):
    """The tier does not have these blocks, and no longer reads the slots: offer them again."""

    tier: int
    request: RequestId
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    epoch: int


class StoresWanted(Message, frozen=True, gc=False):
    """The tier has room for so many deferred blocks. Answered with StoresOffered."""

    tier: int
    blocks: int


class StoresOffered(Message, frozen=True, gc=False):
    """The deferred blocks are on their way, as Cascades; ``is_all``: there are no more to request.

    ``lost``: deferred blocks that are no longer here, or that follow one that is not.
    """

    is_all: bool
    lost: int
