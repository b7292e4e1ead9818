"""No test of a backend depends on a limit of the product's that it does not set."""

from __future__ import annotations

from tests.support.patient_backends import _patient_backends  # noqa: F401 - a fixture
from tests.support.patient_limits import _patient_limits  # noqa: F401 - a fixture
