"""Defines the interface of an eviction policy, as plain calls.

A policy tracks which keys are resident and in what order they were used. It
never waits and does no I/O; ``kvtier/core/policy_actor.py`` gives it a mailbox.
A third party registers a class under the entry-point group
``kvtier.eviction_policies``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.plugin_api.keys import Key, RequestId


class EvictionPolicy(ABC):
    """Chooses the blocks to evict. ``capacity`` is in blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
        """Learn that ``keys``, given from head to tail, are resident now."""

    @abstractmethod
    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        """Learn that ``request`` used ``keys``, given from head to tail. Ignore unknown keys."""

    @abstractmethod
    def hold(self, keys: Sequence[Key]) -> None:
        """Never choose ``keys`` until ``unhold``, resident already or not.

        A key is held once, however often this is called.
        """

    @abstractmethod
    def unhold(self, keys: Sequence[Key]) -> None:
        """Let ``keys`` be chosen again."""

    @abstractmethod
    def forget(self, keys: Sequence[Key]) -> None:
        """Learn that ``keys`` are gone for a reason other than having been chosen."""

    @abstractmethod
    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        """Learn that ``request`` is over.

        ``order``, if known: all its keys from head to tail, resident or not,
        read from here or found on the GPU. It has used them all.
        """

    @abstractmethod
    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        """Choose and forget up to ``count`` keys, neither held nor in ``exclude``."""

    @abstractmethod
    def restore(self, keys: Sequence[Key]) -> None:
        """Take back keys that were just chosen but not evicted; they are the next victims."""

    def pass_time(self, now: float) -> None:  # noqa: B027 - most policies need no clock
        """Learn the time, ``now``: seconds of the runtime's clock, about once a second."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many keys are resident."""
