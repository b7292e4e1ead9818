"""What the tests of the shipped suites share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance._shelves import SHELVES
from tests.support.patient_backends import _patient_backends  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def _no_shelves() -> Iterator[None]:
    yield
    SHELVES.clear()
