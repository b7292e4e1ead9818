"""No test of a backend depends on a limit of the product's that it does not set."""

from __future__ import annotations

from tests.support.patient_backends import _patient_backends as _patient_backends
