"""ARC, the adaptive replacement cache, aware of requests.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
FAST 2003. Blocks used by one request stand in a *recent* list, blocks that a
second request used too in a *frequent* one. Keys that left either are
remembered as ghosts; one that comes back says that its list was too short, and
moves the target between the two.

Both lists are ``LRUPolicy``, so within a request tails go before heads. A
block that the request which brought it uses again (a store and then a load,
say) is not used a second time in ARC's sense.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvtier.policies.base import EvictionPolicy
from kvtier.policies.lru import LRUPolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.messages import Key, RequestId

_Ghosts = OrderedDict["Key", None]


class ARCPolicy(EvictionPolicy):
    """Adaptive replacement; tails before heads within a request."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recent = LRUPolicy(capacity)
        self._frequent = LRUPolicy(capacity)
        self._recent_ghosts: _Ghosts = OrderedDict()
        self._frequent_ghosts: _Ghosts = OrderedDict()
        self._brought_by: dict[Key, RequestId] = {}  # of the recent blocks
        self._recent_target = 0.0  # blocks; the paper's p

    def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
        """See ``EvictionPolicy.admit``. A ghost that comes back is frequent at once."""
        new = []
        back = []
        for key in keys:
            if key in self._recent_ghosts:
                self._adapt(len(self._frequent_ghosts) / len(self._recent_ghosts), longer=True)
                del self._recent_ghosts[key]
                back.append(key)
            elif key in self._frequent_ghosts:
                self._adapt(len(self._recent_ghosts) / len(self._frequent_ghosts), longer=False)
                del self._frequent_ghosts[key]
                back.append(key)
            else:
                new.append(key)
        self._recent.admit(new, request, held=False)
        self._frequent.admit(back, request, held=False)
        if held:
            self.hold(keys)
        self._brought_by.update(dict.fromkeys(new, request))

    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        """See ``EvictionPolicy.touch``. Used by a second request, a block becomes frequent."""
        again = [
            key for key in keys if key in self._recent and self._brought_by.get(key) != request
        ]
        self._recent.forget(again)
        for key in again:
            self._brought_by.pop(key, None)
        self._recent.touch(keys, request)
        self._frequent.admit(again, request, held=False)
        self._frequent.touch(keys, request)

    def hold(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.hold``. Told to both lists: a held block may change between them."""
        self._recent.hold(keys)
        self._frequent.hold(keys)

    def unhold(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.unhold``."""
        self._recent.unhold(keys)
        self._frequent.unhold(keys)

    def forget(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.forget``. Nobody chose them, so they leave no ghost."""
        self._recent.forget(keys)
        self._frequent.forget(keys)
        for key in keys:
            self._brought_by.pop(key, None)

    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        """See ``EvictionPolicy.end_request``."""
        self._recent.end_request(request, order)
        self._frequent.end_request(request, order)

    def choose_victims(self, count: int, spare: Collection[Key]) -> list[Key]:
        """See ``EvictionPolicy.choose_victims``. Recent blocks down to the target, then frequent.

        Where a list has nothing to give, the other one does.
        """
        too_many = max(0, len(self._recent) - int(self._recent_target))
        recent = self._recent.choose_victims(min(count, too_many), spare)
        frequent = self._frequent.choose_victims(count - len(recent), spare)
        recent += self._recent.choose_victims(count - len(recent) - len(frequent), spare)
        for key in recent:
            self._brought_by.pop(key, None)
        self._recent_ghosts.update(dict.fromkeys(recent))
        self._frequent_ghosts.update(dict.fromkeys(frequent))
        self._trim_ghosts()
        return recent + frequent

    def take_back(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.take_back``. Their ghosts show where they came from."""
        frequent = [key for key in keys if key in self._frequent_ghosts]
        recent = [key for key in keys if key not in self._frequent_ghosts and key not in self]
        for key in keys:
            self._recent_ghosts.pop(key, None)
            self._frequent_ghosts.pop(key, None)
        self._recent.take_back(recent)
        self._frequent.take_back(frequent)

    def clear(self) -> None:
        """See ``EvictionPolicy.clear``."""
        self._recent.clear()
        self._frequent.clear()
        self._recent_ghosts.clear()
        self._frequent_ghosts.clear()
        self._brought_by.clear()
        self._recent_target = 0.0

    def __len__(self) -> int:
        """See ``EvictionPolicy.__len__``."""
        return len(self._recent) + len(self._frequent)

    def __contains__(self, key: object) -> bool:
        """Tell whether the key is resident."""
        return key in self._recent or key in self._frequent

    def _adapt(self, ratio: float, *, longer: bool) -> None:
        """Move the target of the recent list by the paper's step: the ghosts' ratio, at least 1."""
        step = max(1.0, ratio)
        target = self._recent_target + (step if longer else -step)
        self._recent_target = min(float(self.capacity), max(0.0, target))

    def _trim_ghosts(self) -> None:
        """Keep to the paper's bounds: recent with its ghosts one capacity, all together two."""
        while self._recent_ghosts and (
            len(self._recent) + len(self._recent_ghosts) > self.capacity
        ):
            self._recent_ghosts.popitem(last=False)
        ghosts = len(self._recent_ghosts) + len(self._frequent_ghosts)
        surplus = len(self) + ghosts - 2 * self.capacity
        for _ in range(min(surplus, len(self._frequent_ghosts))):
            self._frequent_ghosts.popitem(last=False)
