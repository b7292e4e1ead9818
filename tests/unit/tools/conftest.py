"""A runtime here is patient, but for the limits that a test sets; and commands can be run."""

from __future__ import annotations

import pytest

from tests.support.patient_limits import _patient_limits  # noqa: F401 - a fixture
from tests.unit.tools._shell import Shell


@pytest.fixture
def kvtier(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)
