"""Least recently used, aware of requests.

Keys stand in runs (``kvtier/plugin_api/runs.py``): each holds the keys that one request
was the last to use, from head to tail, and the request that last used anything
has the newest. The victim is the tail of the oldest run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.policies.eviction.queues import QueuePolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.plugin_api.keys import Key, RequestId


class LRUPolicy(QueuePolicy):
    """Least recently used; tails before heads within a request."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, queues=1)
        (self._runs,) = self._queues

    def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
        """See ``EvictionPolicy.admit``."""
        new = dict.fromkeys(keys)  # once, for both
        self._runs.put(new, request)
        if held:
            self._held.update(new)

    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        """See ``EvictionPolicy.touch``. A key keeps its place in its own request's run."""
        self._runs.use(keys, request)

    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        """See ``EvictionPolicy.end_request``."""
        self._runs.end(request, order)

    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        """See ``EvictionPolicy.choose_victims``. Tails first, from the oldest run on."""
        return self._runs.pop(count, exclude)

    def restore(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.restore``."""
        # They were chosen tail first, so the last of them stands nearest to the head.
        # One that was admitted again meanwhile has a newer place.
        self._runs.put_first([key for key in reversed(keys) if key not in self._runs])
