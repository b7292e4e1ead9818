"""Tools for the authors of backends and of eviction policies.

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
from kvtier.testing.server_faults import FaultyServer as FaultyServer
from kvtier.testing.server_faults import ServerFault as ServerFault
from kvtier.testing.server_faults import check_server_fault as check_server_fault

__all__ = [
    "BACKEND_CHECKS",
    "PERSISTENCE_CHECKS",
    "POLICY_CHECKS",
    "BackendCheck",
    "FaultyServer",
    "MakeBackend",
    "MakePolicy",
    "NotConforming",
    "PolicyCheck",
    "ServerFault",
    "check_backend",
    "check_policy",
    "check_server_fault",
]
