"""What kvtier ships for the authors of backends and of eviction policies.

The conformance suite of backends is here. The test cell, in which a test picks
the order of deliveries, is ``kvtier.testing.cell``.
"""

from kvtier.testing.conformance import BACKEND_CHECKS as BACKEND_CHECKS
from kvtier.testing.conformance import PERSISTENCE_CHECKS as PERSISTENCE_CHECKS
from kvtier.testing.conformance import BackendCheck as BackendCheck
from kvtier.testing.conformance import MakeBackend as MakeBackend
from kvtier.testing.conformance import NotConforming as NotConforming
from kvtier.testing.conformance import check_backend as check_backend

__all__ = [
    "BACKEND_CHECKS",
    "PERSISTENCE_CHECKS",
    "BackendCheck",
    "MakeBackend",
    "NotConforming",
    "check_backend",
]
