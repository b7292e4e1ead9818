"""Counts the blocks of one namespace by walking its storage, and selects those to remove."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.plugin_api.keys import is_unnamed

if TYPE_CHECKING:
    from kvtier.plugin_api.keys import Key


@dataclass
class Holding:
    """The blocks of one namespace. Times are seconds since 1970, None if storage has none."""

    namespace: str
    blocks: int = 0
    bytes: int = 0  #: of blocks, and of their protection
    oldest_s: int | None = None
    newest_s: int | None = None
    dead_blocks: int = 0  #: of unnamed weights: no engine that starts finds them
    dead_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)  #: empty: not known

    def add(self, key: Key | None, size: int, stored_s: float | None = None) -> None:
        """Add a block. ``key``: None if its name does not contain it."""
        self.blocks += 1
        self.bytes += size
        if key is not None and is_unnamed(key):
            self.dead_blocks += 1
            self.dead_bytes += size
        if stored_s is not None:
            self.oldest_s = min(int(stored_s), self.oldest_s or int(stored_s))
            self.newest_s = max(int(stored_s), self.newest_s or 0)

    def describe(self, facts: dict[str, Any]) -> None:
        """Set the facts from the namespace's description."""
        self.facts = facts


class Wanted(NamedTuple):
    """Selects the blocks to remove: those that match all of this."""

    namespace: str | None = None
    before_s: float | None = None  #: stored before that
    dead: bool = False  #: of unnamed weights

    @property
    def are_whole_namespaces(self) -> bool:
        """Return whether nothing of a namespace stays."""
        return self.before_s is None and not self.dead

    def has(self, namespace: str, key: Key | None, stored_s: float | None = None) -> bool:
        """Return whether a block is to be removed. ``key``, ``stored_s``: None if not known."""
        if self.namespace not in (None, namespace):
            return False
        if self.before_s is not None and (stored_s is None or stored_s >= self.before_s):
            return False
        return not self.dead or (key is not None and is_unnamed(key))
