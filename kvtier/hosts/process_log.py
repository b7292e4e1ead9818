"""Sends all log lines of a tier's process to the engine's log, whichever library logs them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast, get_args

import structlog

from kvtier.hosts.channel import Fields, Level
from kvtier.plugin_api.log import printable

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    Say = Callable[[Level, str, Fields], None]


def send_log_to(say: Say) -> None:
    """Call ``say`` with level, event and fields of each line. From any thread."""

    def pass_on(
        _logger: object, level: str, fields: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        event = printable(str(fields.pop("event", "")))
        say(_level(level), event, {name: _plain(value) for name, value in fields.items()})
        raise structlog.DropEvent

    structlog.configure(
        processors=[structlog.processors.format_exc_info, pass_on],
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_Handler(say)], level=logging.INFO, force=True)


class _Handler(logging.Handler):
    """Passes on lines that backends log with the standard library."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one line on."""
        level = _level(logging.getLevelName(record.levelno).lower())
        self._say(level, printable(self.format(record)), {"logger": record.name})


def _level(name: str) -> Level:
    return cast("Level", name) if name in get_args(Level) else "info"


def _plain(value: object) -> str | int | float | bool | None:
    """Return the value if it can be sent as it is, else its text."""
    if isinstance(value, float | bool | None):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    return printable(str(value))
