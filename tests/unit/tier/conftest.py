"""A runtime here is patient, but for the limits that a test sets."""

from __future__ import annotations

from tests.support.patient_limits import _patient_limits  # noqa: F401 - a fixture
