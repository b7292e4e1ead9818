"""Implements the common part of ``lru`` and ``arc``: queues of runs, and held keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.plugin_api.eviction_policy import EvictionPolicy
from kvtier.plugin_api.runs import Runs, hold, unhold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.keys import Key


class QueuePolicy(EvictionPolicy):
    """Each resident key is in one of ``_queues``."""

    def __init__(self, capacity: int, *, queues: int) -> None:
        super().__init__(capacity)
        self._held: dict[Key, None] = {}
        self._queues = tuple([Runs(self._held.keys()) for _ in range(queues)])

    def hold(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.hold``."""
        hold(self._held, keys)

    def unhold(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.unhold``."""
        unhold(self._held, keys)
        for queue in self._queues:
            queue.unheld(keys)

    def forget(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.forget``. They were not chosen, so they leave no ghost."""
        for queue in self._queues:
            queue.drop(keys)
        unhold(self._held, keys)

    def clear(self) -> None:
        """See ``EvictionPolicy.clear``."""
        for queue in self._queues:
            queue.clear()
        self._held.clear()

    def __len__(self) -> int:
        """See ``EvictionPolicy.__len__``."""
        return sum(map(len, self._queues))

    def __contains__(self, key: object) -> bool:
        """Return whether the key is resident."""
        for queue in self._queues:  # noqa: SIM110 - a generator takes twice as long
            if key in queue.run_of:
                return True
        return False
