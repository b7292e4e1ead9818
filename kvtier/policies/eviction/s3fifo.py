"""S3-FIFO, aware of requests.

Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023. New
blocks enter a *small* queue. Blocks that two more requests used before they get out
move on to the *main* queue; the rest is evicted and remembered as a ghost. A
ghost that comes back enters the main queue. Blocks that get out of that go round
again, once for each of their uses.

Deviations from the paper:

- Both queues are ``Runs``, so within a request tails go before heads. A run
  stands where its request last put something in, or ended.
- All uses of a block by one request count as one, and as none if it brought the block.
- A call gives up looking for blocks that were not used after
  ``LOOKED_AT_MAX``, instead of going round the whole main queue up to three
  times; then the next ones go, used or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.runs import hold
from kvtier.policies.eviction.queues import QueuePolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.plugin_api.keys import Key, RequestId

SMALL_FRACTION: Final = 0.1
"""How much of the capacity the small queue keeps."""
GHOST_FRACTION: Final = 0.9
"""How many keys are remembered: as many as the main queue has room for."""
USES_MAX: Final = 3
USES_TO_STAY: Final = 2
"""How many uses bring a block from the small queue to the main one."""
LOOKED_AT_MAX: Final = 1024
"""How many blocks a call looks at in vain: five milliseconds."""


class S3FIFOPolicy(QueuePolicy):
    """A small queue in front of a main one; tails before heads within a request."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, queues=2, ghost_queues=1)
        self._small, self._main = self._queues
        (self._ghosts,) = self._ghost_queues
        self._uses: dict[Key, int] = {}  # of resident blocks, if any
        self._used_by: dict[RequestId, dict[Key, None]] = {}  # of requests that are not over

    def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
        """See ``EvictionPolicy.admit``. A ghost that comes back enters the main queue."""
        if held:
            hold(self._held, keys)
        if not (self._small.isdisjoint(keys) and self._main.isdisjoint(keys)):
            self.touch(keys, request)
            keys = [key for key in keys if key not in self]
        self._used(request).update(dict.fromkeys(keys))
        if not self._ghosts.isdisjoint(keys):
            back = [key for key in keys if key in self._ghosts]
            keys = [key for key in keys if key not in self._ghosts]
            self._ghosts.drop(back)
            self._main.put(back, request)
        self._small.put(keys, request)

    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        """See ``EvictionPolicy.touch``. It moves nothing."""
        used = self._used(request)
        uses = self._uses
        small, main = self._small.run_of, self._main.run_of
        for key in keys:
            if key not in used and (key in small or key in main):
                used[key] = None
                uses[key] = min(USES_MAX, uses.get(key, 0) + 1)

    def _used(self, request: RequestId) -> dict[Key, None]:
        """Return the blocks that a request has used; it may use more."""
        used = self._used_by.get(request)
        if used is None:
            if len(self._used_by) >= self.requests_max:
                self.end_request(next(iter(self._used_by)), None)
            used = self._used_by[request] = {}
        return used

    def forget(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.forget``."""
        super().forget(keys)
        self._forget_uses(keys)

    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        """See ``EvictionPolicy.end_request``. Its blocks in a queue get its order there."""
        if order is not None:
            self.touch(order, request)
        for queue in self._queues:
            run = queue.open(request)
            if run is not None:
                queue.end(request, order and [key for key in order if queue.run_of.get(key) is run])
        self._used_by.pop(request, None)

    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        """See ``EvictionPolicy.choose_victims``."""
        victims: list[Key] = []
        stay: list[Key] = []  # they enter the main queue together, for the sake of long runs
        small_target = int(SMALL_FRACTION * self.capacity)
        while (missing := count - len(victims)) > 0 and len(stay) < LOOKED_AT_MAX:
            surplus = len(self._small) - small_target
            if popped := self._small.pop(min(missing, surplus), exclude):
                victims += self._leave_small(popped, stay)
            elif popped := self._main.pop(missing, exclude):
                victims += self._leave_main(popped, stay)
            elif stay:
                self._main.put(stay[::-1], None)
                stay = []
            elif popped := self._small.pop(1, exclude):  # the next may stand in the main queue
                victims += self._leave_small(popped, stay)
            else:
                break
        self._main.put(stay[::-1], None)
        for queue in (self._main, self._small):
            victims += queue.pop(count - len(victims), exclude)
        self._ghosts.pop(len(self._ghosts) - int(GHOST_FRACTION * self.capacity), ())
        self._forget_uses(victims)
        return victims

    def _leave_small(self, popped: list[Key], stay: list[Key]) -> list[Key]:
        """Return those that go, now ghosts. Used blocks move on to the main queue."""
        uses = self._uses
        stay += [key for key in popped if uses.get(key, 0) >= USES_TO_STAY]
        going = [key for key in popped if uses.get(key, 0) < USES_TO_STAY]
        self._ghosts.put(going[::-1], None)
        return going

    def _leave_main(self, popped: list[Key], stay: list[Key]) -> list[Key]:
        """Return those that go. Used blocks go round again, for one use less."""
        uses = self._uses
        going = []
        for key in popped:
            left = uses.get(key, 0) - 1
            if left < 0:
                going.append(key)
                continue
            stay.append(key)
            if left:
                uses[key] = left
            else:
                del uses[key]
        return going

    def restore(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.restore``. Ghosts were in the small queue."""
        back = [key for key in reversed(keys) if key not in self]
        self._small.put_first([key for key in back if key in self._ghosts])
        self._main.put_first([key for key in back if key not in self._ghosts])
        self._ghosts.drop(back)

    def clear(self) -> None:
        """See ``EvictionPolicy.clear``."""
        super().clear()
        self._uses.clear()
        self._used_by.clear()

    def _forget_uses(self, keys: Collection[Key]) -> None:
        for key in keys:
            self._uses.pop(key, None)
