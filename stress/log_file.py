"""Has kvtier's log go into a file: on the screen it would bury the verdict."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def log_into(path: Path) -> Iterator[None]:
    """Write to ``path`` until the end of the block."""
    with path.open("a", buffering=1) as file:
        structlog.configure(
            processors=[
                structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
                structlog.processors.format_exc_info,
                structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0),
            ],
            logger_factory=structlog.WriteLoggerFactory(file),
        )
        try:
            yield
        finally:
            structlog.reset_defaults()
