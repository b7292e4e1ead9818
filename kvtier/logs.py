"""The log, by structlog, which is imported when the first line is written.

Importing it takes longer than importing all of kvtier, and a healthy runtime
writes nothing.
"""

from __future__ import annotations

from typing import Any, Final


class LazyLogger:
    """Has the few methods of a structlog logger that kvtier uses. Any thread."""

    def info(self, event: str, **fields: object) -> None:
        """Write a line that a person may want to know."""
        self._logger().info(event, **fields)

    def warning(self, event: str, **fields: object) -> None:
        """Write a line about trouble that kvtier copes with."""
        self._logger().warning(event, **fields)

    def error(self, event: str, *, exc_info: bool = False, **fields: object) -> None:
        """Write a line about something that broke, with its traceback if asked for."""
        self._logger().error(event, exc_info=exc_info, **fields)

    def _logger(self) -> Any:  # noqa: ANN401 - structlog's loggers are made at run time
        import structlog  # noqa: PLC0415 - see the module's docstring

        return structlog.get_logger("kvtier")


log: Final = LazyLogger()
