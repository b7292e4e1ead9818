"""Defines how a command is notified of the progress of what it runs."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Progress of one task."""

    def advance(self, count: int = 1) -> None:
        """Count ``count`` more items of the total as done."""
