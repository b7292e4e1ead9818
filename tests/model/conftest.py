"""Quiet: the model breaks tiers on purpose, thousands of times."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest
import structlog

# Hypothesis draws constants of all modules that are loaded. With these, which are loaded late,
# a test draws the same alone and after others, and a seed is worth something.
import kvtier.policies.admission.predicted_reuse
import kvtier.policies.admission.second_touch  # noqa: F401

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
