"""The policies that the model is checked with, and a look inside each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.policies.arc import ARCPolicy
from kvtier.policies.lru import LRUPolicy

if TYPE_CHECKING:
    from kvtier.messages import Key
    from kvtier.policies.base import EvictionPolicy

POLICIES = {"lru": LRUPolicy, "arc": ARCPolicy}


def known_to(policy: EvictionPolicy) -> set[Key]:
    """Return the keys that the policy takes for resident."""
    if isinstance(policy, ARCPolicy):
        return known_to(policy._recent) | known_to(policy._frequent)
    assert isinstance(policy, LRUPolicy)
    return set(policy._run_of)


def held_by(policy: EvictionPolicy) -> set[Key]:
    """Return the keys that the policy would not choose."""
    if isinstance(policy, ARCPolicy):
        return held_by(policy._recent) | held_by(policy._frequent)
    assert isinstance(policy, LRUPolicy)
    return policy._held
