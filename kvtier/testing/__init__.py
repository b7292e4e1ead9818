"""What kvtier ships for the authors of backends and of eviction policies.

The conformance suites of both are here. The test cell, in which a test picks
the order of deliveries, is ``tests.support.cell``.
"""

from kvtier.testing.conformance import BACKEND_CHECKS as BACKEND_CHECKS
from kvtier.testing.conformance import PERSISTENCE_CHECKS as PERSISTENCE_CHECKS
from kvtier.testing.conformance import BackendCheck as BackendCheck
from kvtier.testing.conformance import MakeBackend as MakeBackend
from kvtier.testing.conformance import NotConforming as NotConforming
from kvtier.testing.conformance import check_backend as check_backend
from kvtier.testing.policy_conformance import POLICY_CHECKS as POLICY_CHECKS
from kvtier.testing.policy_conformance import MakePolicy as MakePolicy
from kvtier.testing.policy_conformance import PolicyCheck as PolicyCheck
from kvtier.testing.policy_conformance import check_policy as check_policy

__all__ = [
    "BACKEND_CHECKS",
    "PERSISTENCE_CHECKS",
    "POLICY_CHECKS",
    "BackendCheck",
    "MakeBackend",
    "MakePolicy",
    "NotConforming",
    "PolicyCheck",
    "check_backend",
    "check_policy",
]
