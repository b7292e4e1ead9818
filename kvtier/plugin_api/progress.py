"""Shows the progress of long work, if there is a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Progress(Protocol):
    """Work that is being watched."""

    def advance(self, count: int = 1) -> None:
        """Note that ``count`` more of the total are done."""


class ShowProgress(Protocol):
    """Begins to show work; the context manager ends it."""

    def __call__(self, label: str, total: int | None) -> AbstractContextManager[Progress]:
        """``total``: of what ``advance`` counts; None if it is not known."""
