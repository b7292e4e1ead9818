"""Defines a frozen snapshot of a tier with a capacity: for tests and for diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plugin_api.keys import Key


@dataclass(frozen=True)
class TierAudit:
    """Snapshot of a secondary tier with a capacity. Keys are the backend's."""

    capacity: int
    mark: bytes
    since: int
    knows_generation: bool
    resident: frozenset[Key]
    old: frozenset[Key]  #: of generations that the engine is not in
    storing: Mapping[Key, int]
    coming: frozenset[Key]
    removing: frozenset[Key]
    in_use: Mapping[Key, int]
    leftovers: frozenset[Key]
    leftovers_are_deferred: bool
