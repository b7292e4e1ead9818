"""Provides the log, by structlog, which is imported when the first line is written.

A program with a log of its own, as vLLM, takes the lines with ``send_to``.

Importing it takes longer than importing all of kvtier, and programs that use parts of kvtier
often log nothing.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from structlog.typing import Processor

    #: Takes a line's level, its event and its fields.
    Sink = Callable[[str, str, Mapping[str, Any]], None]


class LazyLogger:
    """Has the few methods of a structlog logger that kvtier uses. Any thread."""

    _sink: Sink | None = None

    def send_to(self, sink: Sink) -> None:
        """Write by ``sink``, with level, event and fields, unless structlog is configured."""
        self._sink = sink

    def debug(self, event: str, **fields: object) -> None:
        """Write a line about a single request."""
        self.write("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Write a line that an operator may want to know."""
        self.write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Write a line about a fault that kvtier copes with."""
        self.write("warning", event, fields)

    def error(self, event: str, *, exc_info: bool = False, **fields: object) -> None:
        """Write a line about something that broke, with its traceback if requested."""
        self.write("error", event, {"exc_info": exc_info, **fields})

    def write(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        """Write a line by the logger's method ``level``.

        A line that can't be written is dropped: the disk with the log may be full, or its reader
        gone, and that must not stop the caller.
        """
        with suppress(Exception):
            import structlog  # noqa: PLC0415 - see the module's docstring

            is_configured = structlog.is_configured()
            if self._sink is not None and not is_configured:
                self._sink(level, event, fields)
                return
            processors = None if is_configured else default_processors()
            logger = structlog.wrap_logger(None, processors, logger_factory_args=("kvtier",))
            getattr(logger, level)(event, **fields)


def default_processors() -> list[Processor]:
    """Return structlog's own processors, except that tracebacks show no variables of functions.

    If rich is installed, as with vLLM, structlog's would: passwords among them, and half a
    second of the scheduler's thread for each.
    """
    from structlog import dev, get_config  # noqa: PLC0415 - see the module's docstring

    *before, renderer = get_config()["processors"]
    if isinstance(renderer, dev.ConsoleRenderer):
        coloured = getattr(renderer, "colors", False)  # available since 25.5
        renderer = dev.ConsoleRenderer(colors=coloured, exception_formatter=dev.plain_traceback)
    return [*before, renderer]


def printable(text: str) -> str:
    """Return text that every encoder takes: parts of file names may be invalid characters."""
    return text.encode("utf-8", "backslashreplace").decode()


log: Final = LazyLogger()
"""The log of all of kvtier; a backend may write its own lines to it."""
