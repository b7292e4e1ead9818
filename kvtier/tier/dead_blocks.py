"""Tracks the blocks of unnamed weights in a tier without eviction, to remove them later.

No other engine finds such blocks. Once this engine's weights change again, or it ends, they are
dead, and take room that is never freed. So the engine that stored them then removes them, some
at a time. Those that it can't remove, because it was killed or the storage did not respond, are
left to ``kvtier purge --dead``.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from kvtier.core.generations import is_found_again
from kvtier.tier.leftovers import REMOVE_BLOCKS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtier.plugin_api.keys import Key

KEYS_MAX: Final = 200_000
"""Most blocks to remember: 40 MB. Earlier ones are left to ``kvtier purge``."""


class DeadBlocks:
    """The blocks of unnamed weights that this engine has stored, and those to remove."""

    def __init__(self) -> None:
        self._held: dict[Key, None] = {}  # of the generation that the engine is in
        self._dead: dict[Key, None] = {}
        self._is_removing = False

    def stored(self, keys: Iterable[Key], mark: bytes, current: bytes) -> None:
        """Note stored blocks. ``mark``: theirs; ``current``: of the engine's generation."""
        if is_found_again(mark):
            return
        held = self._held if mark == current else self._dead
        held.update(dict.fromkeys(keys))
        for key in tuple(islice(held, max(0, len(held) - KEYS_MAX))):
            del held[key]

    def leave(self) -> None:
        """Note that the engine leaves its generation: all blocks that it stored in it are dead."""
        if self._held:
            self._dead.update(self._held)
            self._held.clear()

    def begin_removal(self) -> tuple[Key, ...]:
        """Return the keys to remove now: one batch at a time, none if there is nothing."""
        if self._is_removing or not self._dead:
            return ()
        self._is_removing = True
        keys = tuple(islice(self._dead, REMOVE_BLOCKS_MAX))
        for key in keys:
            del self._dead[key]
        return keys

    def end_removal(self) -> None:
        """Note that a batch has ended. Failed removals are not retried."""
        self._is_removing = False
