"""Quiet: the model breaks tiers on purpose, thousands of times."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest
import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    def drop(*_: object) -> NoReturn:
        raise structlog.DropEvent

    held = structlog.get_config()["processors"]
    structlog.configure(processors=[drop])
    yield
    structlog.configure(processors=held)
