"""ARC, the adaptive replacement cache, aware of requests.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
FAST 2003. Blocks used by one request stand in a *recent* list, blocks that a
second request used too in a *frequent* one. Keys that left either are
remembered as ghosts; one that comes back shows that its list was too short, and
moves the recent list's target size.

Both lists are ``Runs``, so within a request tails go before heads. A second
use by the request that brought a block (a store and then a load, say) is none
in ARC's sense. There are at most ``capacity`` ghosts, and by one eviction more
until as many blocks are admitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.plugin_api.runs import Runs, hold
from kvtier.policies.eviction.queues import QueuePolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.plugin_api.keys import Key, RequestId


class ARCPolicy(QueuePolicy):
    """Adaptive replacement; tails before heads within a request."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, queues=2)
        self._recent, self._frequent = self._queues
        self._recent_ghosts, self._frequent_ghosts = Runs(), Runs()
        self._recent_target = 0.0  # blocks; the paper's p

    def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
        """See ``EvictionPolicy.admit``. A ghost that comes back is frequent at once."""
        if held:
            hold(self._held, keys)
        if not (self._recent.isdisjoint(keys) and self._frequent.isdisjoint(keys)):
            self._use(keys, request)
            keys = [key for key in keys if key not in self]
        back = self._adapt(keys)
        self._recent.put([key for key in keys if key not in back] if back else keys, request)
        self._frequent.put(back, request)

    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        """See ``EvictionPolicy.touch``. Used by a second request, a block becomes frequent."""
        self._use(keys, request)

    def _use(self, keys: Sequence[Key], request: RequestId) -> None:
        """Make frequent the recent blocks that another request brought."""
        recent = self._recent.run_of
        frequent = self._frequent.run_of
        own = self._recent.open(request)
        again = []
        used = []
        for key in keys:
            run = recent.get(key, own)
            if run is not own:
                again.append(key)
                used.append(key)
            elif key in frequent:
                used.append(key)
        self._recent.drop(again)
        self._recent.use(keys, request)
        self._frequent.put(used, request)

    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        """See ``EvictionPolicy.end_request``."""
        if order is not None:
            self._use(order, request)
        self._recent.end(request, order)
        self._frequent.end(request, order)

    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        """See ``EvictionPolicy.choose_victims``. Recent blocks down to the target, then frequent.

        If a list has nothing to give, the other one does.
        """
        too_many = len(self._recent) + count - 1 - int(self._recent_target)
        recent = self._recent.pop(min(count, too_many), exclude)
        frequent = self._frequent.pop(count - len(recent), exclude)
        recent += self._recent.pop(count - len(recent) - len(frequent), exclude)
        self._recent_ghosts.put(recent[::-1], None)
        self._frequent_ghosts.put(frequent[::-1], None)
        self._trim_ghosts()
        return recent + frequent

    def restore(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.restore``. Their ghosts show where they came from."""
        back = [key for key in reversed(keys) if key not in self]
        self._frequent.put_first([key for key in back if key in self._frequent_ghosts])
        self._recent.put_first([key for key in back if key not in self._frequent_ghosts])
        self._recent_ghosts.drop(back)
        self._frequent_ghosts.drop(back)

    def clear(self) -> None:
        """See ``EvictionPolicy.clear``."""
        super().clear()
        self._recent_ghosts.clear()
        self._frequent_ghosts.clear()
        self._recent_target = 0.0

    def _adapt(self, keys: Sequence[Key]) -> dict[Key, None]:
        """Move the target by the paper's step for each ghost that comes back; return these."""
        back: dict[Key, None] = {}
        recent, frequent = self._recent_ghosts, self._frequent_ghosts
        if recent.isdisjoint(keys) and frequent.isdisjoint(keys):
            return back
        for key in keys:
            if key in recent:
                step = max(1.0, len(frequent) / len(recent))
                self._recent_target = min(float(self.capacity), self._recent_target + step)
            elif key in frequent:
                step = max(1.0, len(recent) / len(frequent))
                self._recent_target = max(0.0, self._recent_target - step)
            else:
                continue
            recent.drop((key,))
            frequent.drop((key,))
            back[key] = None
        return back

    def _trim_ghosts(self) -> None:
        """Keep to the paper's bounds: recent with its ghosts one capacity, all together two."""
        surplus = len(self._recent) + len(self._recent_ghosts) - self.capacity
        self._recent_ghosts.pop(surplus, ())
        ghosts = len(self._recent_ghosts) + len(self._frequent_ghosts)
        self._frequent_ghosts.pop(len(self) + ghosts - 2 * self.capacity, ())
