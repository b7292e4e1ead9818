"""The policies that the model is checked with, and a look inside each."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from world import KEYS

from kvtier.policies.eviction.arc import ARCPolicy
from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.policies.eviction.reuse import policy as reuse
from kvtier.policies.eviction.reuse.model import ReuseModel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtier.plugin_api.keys import Key

NEW_MODEL = ReuseModel()
_NEVER_CHANGE = (NEW_MODEL.cohorts, NEW_MODEL._kinds, NEW_MODEL._traits)


def _new_model() -> ReuseModel:
    return deepcopy(NEW_MODEL, {id(each): each for each in _NEVER_CHANGE})


class ReusePolicy(reuse.ReusePolicy):
    """The real one, with a copy of a new model: to make each anew took half of the time."""

    def __init__(self, capacity: int) -> None:
        with patch.object(reuse, "ReuseModel", _new_model):
            super().__init__(capacity)


POLICIES = {
    "lru": LRUPolicy,
    "arc": ARCPolicy,
    "reuse": ReusePolicy,
}


def known_to(policy: Any, keys: Iterable[Key] = KEYS) -> set[Key]:
    """Return those of ``keys`` that the policy takes for resident: it must be all it has."""
    known = {key for key in keys if key in policy}
    assert len(known) == len(policy), "it counts keys that it does not know, or the other way"
    return known


def held_by(policy: Any) -> set[Key]:
    """Return the keys that the policy would not choose. Ours keep them all in one place."""
    return set(policy._held)
