"""Tracks the holes of a tier: blocks that it could not take yet, and blocks that it will not get.

A tier that writes slowly, is full or fails for a while takes some blocks later than they come, or
never. A block that it could not take is deferred: it stays in host memory for as long as the policy
there keeps it, and is offered again when the tier has room, heads before tails. A block is of no
use in a tier without the one before it in its request. So a block that follows a deferred one is
deferred too, and a block that follows a lost one is not written: no lookup could find it.

A block is lost if it left host memory before the tier had room for it, or never got a slot there.
It stops being a hole once it is sent to the tier, or once the tier is known to have it.

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
    before: Key | None  #: the block that it follows, if known
    is_admitted: bool  #: the tier's admission policy has decided


class MissingPrefixes:
    """The holes of one tier."""

    def __init__(self, keys_max: int, is_there: Callable[[Key], bool]) -> None:
        """``keys_max``: limit on lost blocks kept; the oldest are forgotten.

        ``is_there``: whether the tier is known to have a block.
        """
        self._keys_max = keys_max
        self._is_there = is_there
        self._deferred: dict[
            Key, DeferredBlock
        ] = {}  # in the order in which they are offered again
        self._deferred_of: Counter[RequestId] = Counter()  # how many each request has brought
        self._lost: dict[Key, None] = {}
        self._left_count = 0  # deferred, and lost since ``pop`` reported it

    def __bool__(self) -> bool:
        """Return whether there may be any holes."""
        return bool(self._deferred or self._lost)

    def includes(self, key: Key | None) -> bool:
        """Return whether a block is a hole, so that no block that follows it may be sent."""
        is_one = key in self._deferred or key in self._lost
        return is_one and key is not None and not self._is_there(key)

    def defer(self, key: Key, block: DeferredBlock) -> bool:
        """Have a block wait until the tier has room. False: it follows a lost one, so is lost too.

        A block that waits already keeps its place.
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
        """Return how many of the blocks that a request has brought are waiting."""
        return self._deferred_of.get(request, 0)

    def leave(self, keys: Iterable[Key]) -> None:
        """Note that blocks have left host memory: those that were deferred are lost."""
        gone = [key for key in keys if key in self._deferred]
        self._left_count += len(gone)
        self.lose(gone)

    def lose(self, keys: Iterable[Key]) -> None:
        """Note that, as far as is known, the tier will not get these blocks."""
        for key in keys:
            self._end_wait(key)
            self._lost[key] = None
        while len(self._lost) > self._keys_max:
            del self._lost[next(iter(self._lost))]

    def fill(self, key: Key, before: Key | None) -> None:
        """Note that a block, which follows ``before``, is sent to the tier."""
        assert not self.includes(before), "a block is sent behind a hole"
        self._end_wait(key)
        self._lost.pop(key, None)

    def pop(self, blocks_max: int) -> tuple[dict[Key, DeferredBlock], int]:
        """Return up to ``blocks_max`` blocks to send now, and how many were recently lost."""
        now: dict[Key, DeferredBlock] = {}
        lost: list[Key] = []
        for key, block in self._deferred.items():
            if len(now) == blocks_max:
                break
            if self._is_lost(block.before):
                self._lost[key] = None
                lost.append(key)
            elif block.before in now or not self.includes(block.before):
                now[key] = block  # else the block before goes first
        for key, block in now.items():
            self.fill(key, block.before)
        self.lose(lost)
        lost_count, self._left_count = self._left_count + len(lost), 0
        return now, lost_count

    def clear(self) -> None:
        """Forget all holes: no earlier block is sent to the tier any more."""
        self._deferred.clear()
        self._deferred_of.clear()
        self._lost.clear()
        self._left_count = 0

    def audit(self) -> frozenset[Key]:
        """Return all holes. For tests and diagnosis."""
        return frozenset(key for key in (*self._deferred, *self._lost) if self.includes(key))

    def waiting(self) -> dict[Key, DeferredBlock]:
        """Return the deferred blocks. For tests and diagnosis."""
        return self._deferred.copy()

    def _is_lost(self, key: Key | None) -> bool:
        return key in self._lost and self.includes(key)

    def _end_wait(self, key: Key) -> None:
        block = self._deferred.pop(key, None)
        if block is not None:
            self._deferred_of[block.request] -= 1
            if not self._deferred_of[block.request]:
                del self._deferred_of[block.request]
