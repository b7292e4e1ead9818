"""Has kvtier's log go into a file: on the screen it would bury the verdict."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from structlog.typing import EventDict, WrappedLogger

_LACK_OF_MEMORY: Final = ("MemoryError", f"[Errno {errno.ENOMEM}]")


class Noticed:
    """What the log said that a run must know of."""

    def __init__(self) -> None:
        self.broken_policies: list[str] = []  #: why, but for those that had no memory
        self.broken_threads: list[str] = []  #: what threads of kvtier raised, likewise

    def notice(self, _logger: WrappedLogger, _method: str, entry: EventDict) -> EventDict:
        """Look at an entry, as one of structlog's processors."""
        event = str(entry["event"])
        if event.startswith("eviction policy broke"):
            _add_unless_without_memory(self.broken_policies, str(entry.get("detail")))
        elif event == "unhandled exception in kvtier thread":
            _add_unless_without_memory(self.broken_threads, str(entry.get("error")))
        return entry


def _add_unless_without_memory(broken: list[str], why: str) -> None:
    if not any(each in why for each in _LACK_OF_MEMORY):
        broken.append(why)


@contextmanager
def log_into(path: Path) -> Iterator[Noticed]:
    """Write to ``path`` until the end of the block."""
    noticed = Noticed()
    with path.open("a", buffering=1) as file:
        structlog.configure(
            processors=[
                noticed.notice,
                structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
                structlog.processors.format_exc_info,
                structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0),
            ],
            logger_factory=structlog.WriteLoggerFactory(file),
        )
        try:
            yield noticed
        finally:
            structlog.reset_defaults()
