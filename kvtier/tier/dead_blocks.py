"""What a tier that evicts nothing has of weights without a name, until this engine removes it.

Nobody else finds such blocks. Once this engine's weights change again, or it ends, they are dead,
and take room that nobody would ever free. So the engine that stored them removes them then, some
at a time. What it can't, since it was killed or the storage did not answer, is for
``kvtier purge --dead``.
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
"""40 MB. What was stored first is left to ``kvtier purge``."""


class DeadBlocks:
    """The blocks of weights without a name that this engine has stored, and those to remove."""

    def __init__(self) -> None:
        self._held: dict[Key, None] = {}  # of the generation that the engine is in
        self._dead: dict[Key, None] = {}
        self._is_removing = False

    def stored(self, keys: Iterable[Key], mark: bytes, current: bytes) -> None:
        """Note what was stored. ``mark``: theirs; ``current``: of the engine's generation."""
        if is_found_again(mark):
            return
        held = self._held if mark == current else self._dead
        held.update(dict.fromkeys(keys))
        for key in tuple(islice(held, max(0, len(held) - KEYS_MAX))):
            del held[key]

    def leave(self) -> None:
        """Note that the engine leaves its generation: all that it stored in it is dead."""
        if self._held:
            self._dead.update(self._held)
            self._held.clear()

    def begin_removal(self) -> tuple[Key, ...]:
        """Return what to remove now: one batch at a time, none if there is nothing."""
        if self._is_removing or not self._dead:
            return ()
        self._is_removing = True
        keys = tuple(islice(self._dead, REMOVE_BLOCKS_MAX))
        for key in keys:
            del self._dead[key]
        return keys

    def end_removal(self) -> None:
        """Note that a batch has ended. What failed is not tried again."""
        self._is_removing = False
