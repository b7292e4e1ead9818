"""Writes kvtier's log lines through vLLM's logging, with its format, level and destination."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final

from kvtier.plugin_api.log import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

LOGGER: Final = logging.getLogger("vllm.kvtier")
"""A child of vLLM's logger: what VLLM_LOGGING_CONFIG_PATH sets for that applies to it, too."""

_FRAMES: Final = 4  # logging shows the caller of log.info: that calls write, which calls the sink


def write_to_vllm(level: str, event: str, fields: Mapping[str, Any]) -> None:
    """Write a line, with its fields as key=value behind the event, and a traceback behind those."""
    words = dict(fields)
    exc_info = words.pop("exc_info", False)
    traceback = words.pop("exception", "")  # of a tier's process, which sends it as text
    line = " ".join([event, *(f"{name}={_word(value)}" for name, value in words.items())])
    line = f"{line}\n{traceback}" if traceback else line
    number = logging.getLevelNamesMapping()[level.upper()]
    LOGGER.log(number, printable(line), exc_info=exc_info, stacklevel=_FRAMES)


def _word(value: object) -> str:
    """Return the value in one word, or in quotes."""
    text = str(value)
    is_word = text and not any(each.isspace() or each in "\"'=" for each in text)
    return text if is_word else json.dumps(text, ensure_ascii=False)
