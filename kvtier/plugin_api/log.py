"""The log, by structlog, which is imported when the first line is written.

Importing it takes longer than importing all of kvtier, and what uses parts of it
often writes nothing.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from structlog.typing import Processor


class LazyLogger:
    """Has the few methods of a structlog logger that kvtier uses. Any thread."""

    def info(self, event: str, **fields: object) -> None:
        """Write a line that a person may want to know."""
        self.write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Write a line about a fault that kvtier copes with."""
        self.write("warning", event, fields)

    def error(self, event: str, *, exc_info: bool = False, **fields: object) -> None:
        """Write a line about something that broke, with its traceback if asked for."""
        self.write("error", event, {"exc_info": exc_info, **fields})

    def write(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        """Write a line by the logger's method ``level``.

        One that can't be written is dropped: the disk with the log may be full, or its reader
        gone, and that must stop nobody.
        """
        with suppress(Exception):
            import structlog  # noqa: PLC0415 - see the module's docstring

            processors = None if structlog.is_configured() else default_processors()
            logger = structlog.wrap_logger(None, processors, logger_factory_args=("kvtier",))
            getattr(logger, level)(event, **fields)


def default_processors() -> list[Processor]:
    """Return structlog's own processors, but tracebacks tell no variable of any function.

    Where rich is installed, as vLLM has it, structlog's would: passwords among them, and half a
    second of the scheduler's thread for each.
    """
    from structlog import dev, get_config  # noqa: PLC0415 - see the module's docstring

    *before, renderer = get_config()["processors"]
    if isinstance(renderer, dev.ConsoleRenderer):
        coloured = getattr(renderer, "colors", False)  # told since 25.5
        renderer = dev.ConsoleRenderer(colors=coloured, exception_formatter=dev.plain_traceback)
    return [*before, renderer]


def printable(text: str) -> str:
    """Return text that every encoder takes: parts of file names may be no characters at all."""
    return text.encode("utf-8", "backslashreplace").decode()


log: Final = LazyLogger()
"""Where all of kvtier writes its lines, and a backend may write its own."""
