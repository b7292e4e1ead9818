"""The holes of a tier: blocks that it could not take yet, and blocks that it will not get.

A tier that writes slowly, is full or fails for a while takes some blocks later than they come, or
never. What it could not take is deferred: it stays in host memory for as long as the policy there
likes, and is offered again when the tier has room, heads before tails. A block is of no use in a
tier without the one before it in its request. So what follows on a deferred block is
deferred too, and what follows on one that is lost is not written: nobody could find it.

A block is lost if it left host memory before the tier had room for it, or never got a slot there.
It is no hole any more once it is sent to the tier, or once the tier is known to have it.

Part of the primary tier's actor; one for each tier.

# Invariant: no block is sent to a tier while the one before it in its request is a hole of it.
#            Checked: fill, p18_nothing_is_sent_to_a_tier_behind_a_hole.
# Invariant: what is deferred is in host memory, READY. Checked: send_deferred, foresee.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier.plugin_api.keys import Key, RequestId


class DeferredBlock(NamedTuple):
    """A block that waits until its tier has room."""

    request: RequestId
    before: Key | None  #: the block that it follows on, if that is known
    is_admitted: bool  #: the tier's admission policy has had its say


class MissingPrefixes:
    """Of one tier."""

    def __init__(self, keys_max: int, is_there: Callable[[Key], bool]) -> None:
        """``keys_max``: of those lost: the oldest are forgotten.

        ``is_there``: the tier is known to have it.
        """
        self._keys_max = keys_max
        self._is_there = is_there
        self._deferred: dict[
            Key, DeferredBlock
        ] = {}  # in the order in which they are offered again
        self._deferred_of: Counter[RequestId] = Counter()  # how many each request has brought
        self._lost: dict[Key, None] = {}
        self._left_count = 0  # deferred, and lost since ``pop`` told it

    def __bool__(self) -> bool:
        """Tell whether there may be any."""
        return bool(self._deferred or self._lost)

    def includes(self, key: Key | None) -> bool:
        """Tell whether a block is a hole, and nothing that follows on it may be sent."""
        is_one = key in self._deferred or key in self._lost
        return is_one and key is not None and not self._is_there(key)

    def defer(self, key: Key, block: DeferredBlock) -> bool:
        """Have a block wait until the tier has room. False: it follows on a lost one, and is too.

        One that waits already keeps its place.
        """
        if self._is_lost(block.before):
            self.lose((key,))
            return False
        self._lost.pop(key, None)
        if key not in self._deferred:
            self._deferred[key] = block
            self._deferred_of[block.request] += 1
        return True

    def deferred_of(self, request: RequestId) -> int:
        """Return how many blocks wait that a request has brought."""
        return self._deferred_of.get(request, 0)

    def leave(self, keys: Iterable[Key]) -> None:
        """Note that blocks have left host memory: what was deferred of them is lost."""
        gone = [key for key in keys if key in self._deferred]
        self._left_count += len(gone)
        self.lose(gone)

    def lose(self, keys: Iterable[Key]) -> None:
        """Note that the tier will not get these, for all that is known."""
        for key in keys:
            self._end_wait(key)
            self._lost[key] = None
        while len(self._lost) > self._keys_max:
            del self._lost[next(iter(self._lost))]

    def fill(self, key: Key, before: Key | None) -> None:
        """Note that a block, which follows on ``before``, is sent to the tier."""
        assert not self.includes(before), "a block is sent behind a hole"
        self._end_wait(key)
        self._lost.pop(key, None)

    def pop(self, blocks_max: int) -> tuple[dict[Key, DeferredBlock], int]:
        """Return what may be sent now, at most so many blocks, and how many were lost lately."""
        now: dict[Key, DeferredBlock] = {}
        lost: list[Key] = []
        for key, block in self._deferred.items():
            if len(now) == blocks_max:
                break
            if self._is_lost(block.before):
                self._lost[key] = None
                lost.append(key)
            elif block.before in now or not self.includes(block.before):
                now[key] = block  # else that one goes first
        for key, block in now.items():
            self.fill(key, block.before)
        self.lose(lost)
        lost_count, self._left_count = self._left_count + len(lost), 0
        return now, lost_count

    def clear(self) -> None:
        """Forget all: the tier is given nothing from before any more."""
        self._deferred.clear()
        self._deferred_of.clear()
        self._lost.clear()
        self._left_count = 0

    def audit(self) -> frozenset[Key]:
        """Return all holes. For tests and diagnosis."""
        return frozenset(key for key in (*self._deferred, *self._lost) if self.includes(key))

    def waiting(self) -> dict[Key, DeferredBlock]:
        """Return what is deferred. For tests and diagnosis."""
        return self._deferred.copy()

    def _is_lost(self, key: Key | None) -> bool:
        return key in self._lost and self.includes(key)

    def _end_wait(self, key: Key) -> None:
        block = self._deferred.pop(key, None)
        if block is not None:
            self._deferred_of[block.request] -= 1
            if not self._deferred_of[block.request]:
                del self._deferred_of[block.request]
