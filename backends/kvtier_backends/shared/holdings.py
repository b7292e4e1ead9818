"""What storage holds of one namespace, counted by walking it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Holding:
    """The blocks of one namespace. Times are seconds since 1970, None where storage tells none."""

    namespace: str
    blocks: int = 0
    bytes: int = 0  #: of blocks, and of what protects them
    oldest_s: int | None = None
    newest_s: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)  #: empty: not known

    def add(self, size: int, stored_s: float | None = None) -> None:
        """Add a block."""
        self.blocks += 1
        self.bytes += size
        if stored_s is not None:
            self.oldest_s = min(int(stored_s), self.oldest_s or int(stored_s))
            self.newest_s = max(int(stored_s), self.newest_s or 0)

    def describe(self, facts: dict[str, Any]) -> None:
        """Take in what the description of the namespace says."""
        self.facts = facts
