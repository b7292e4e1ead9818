"""LRU-2, aware of requests.

O'Neil, O'Neil and Weikum, "The LRU-K Page Replacement Algorithm For Database
Disk Buffering", SIGMOD 1993, with K = 2: the victim is the block whose second
last use is longest ago. Blocks used once have none, so they go first, by
their last use. The last use of an evicted block is kept for a while: once
it is back, it has been used twice.

Deviations from the paper:

- Time is counted in requests, and all uses of a block by one request are one
  use (the paper's correlated references), at the time of the first of them.
- Both orders are ``Runs``, so within a request tails go before heads.
- The history is bounded in blocks, not in time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.runs import hold
from kvtier.policies.eviction.queues import QueuePolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.plugin_api.keys import Key, RequestId

HISTORY_CAPACITIES: Final = 4
"""How many evicted blocks are remembered, in units of the policy's capacity.

Half as many cost a tenth of the hits of a small cache; more bring nothing. Each costs about
200 bytes, and its key.
"""


class LRU2Policy(QueuePolicy):
    """The second last use decides; tails before heads within a request."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, queues=2, ghost_queues=1)
        # In the order of the last use; by the second last use, whose time is the run's stamp.
        self._once, self._twice = self._queues
        (self._gone,) = self._ghost_queues
        self._last_use: dict[Key, int] = {}  # also of evicted blocks
        self._now = 0  # requests that used anything
        self._time_of: dict[RequestId, int] = {}  # of requests that are not over

    def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
        """See ``EvictionPolicy.admit``. Remembered blocks have been used twice."""
        if held:
            hold(self._held, keys)
        now = self._time(request)
        last_use = self._last_use
        if not last_use.keys().isdisjoint(keys):
            self._gone.drop(keys)
            self._use([key for key in keys if key in last_use], now)
            keys = [key for key in keys if key not in self]
        self._once.put(keys, request)
        for key in keys:
            last_use[key] = now

    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        """See ``EvictionPolicy.touch``. All uses by one request are one use."""
        known, gone = self._last_use, self._gone.run_of
        self._use([key for key in keys if key in known and key not in gone], self._time(request))

    def _time(self, request: RequestId) -> int:
        """Return the time of a request's uses: that of its first."""
        now = self._time_of.get(request)
        if now is None:
            if len(self._time_of) >= self.requests_max:
                self.end_request(next(iter(self._time_of)), None)
            now = self._now = self._time_of[request] = self._now + 1
        return now

    def _use(self, keys: Sequence[Key], now: int) -> None:
        """Move keys used before to the position of their last use, now the second last."""
        last_use = self._last_use
        by_last_use: dict[int, list[Key]] = {}
        for key in keys:
            last = last_use[key]
            if last != now:
                by_last_use.setdefault(last, []).append(key)
                last_use[key] = now
        for last, used in by_last_use.items():
            self._once.drop(used)
            self._twice.put_at(used, last)

    def forget(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.forget``. They were not chosen, so they are not remembered."""
        for key in keys:
            if key in self:
                del self._last_use[key]
        super().forget(keys)

    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        """See ``EvictionPolicy.end_request``."""
        if order is not None:
            self.touch(order, request)
        self._once.end(request, order)
        self._time_of.pop(request, None)

    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        """See ``EvictionPolicy.choose_victims``. Blocks used once first."""
        victims = self._once.pop(count, exclude)
        victims += self._twice.pop(count - len(victims), exclude)
        self._gone.put(victims[::-1], None)
        for key in self._gone.pop(len(self._gone) - HISTORY_CAPACITIES * self.capacity, ()):
            del self._last_use[key]
        return victims

    def restore(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.restore``. The next to go is the block used once, longest ago."""
        back = [key for key in reversed(keys) if key not in self]
        self._gone.drop(back)
        self._once.put_first(back)

    def clear(self) -> None:
        """See ``EvictionPolicy.clear``."""
        super().clear()
        self._last_use.clear()
        self._time_of.clear()
