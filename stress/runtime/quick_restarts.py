"""Shortens the pauses before a tier is begun anew: one that is killed often is to run, too."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from unittest import mock

from kvtier.hosts import process_host, thread_host

if TYPE_CHECKING:
    from collections.abc import Iterator

PAUSE_S: Final = 0.05
PAUSE_S_MAX: Final = 0.5


@contextmanager
def quick_restarts() -> Iterator[None]:
    """Hold for all runtimes that are opened until the end of the block."""
    with (
        mock.patch.object(process_host, "RESTART_PAUSE_S", PAUSE_S),
        mock.patch.object(process_host, "RESTART_PAUSE_S_MAX", PAUSE_S_MAX),
        mock.patch.object(thread_host, "RESTART_PAUSE_S", PAUSE_S),
    ):
        yield
