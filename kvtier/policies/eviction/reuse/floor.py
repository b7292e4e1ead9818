"""Tracks which blocks LRU would have kept, so that ``reuse`` does not fall far behind it.

A sample of the keys, chosen by a byte of each, also goes through an LRU queue whose
capacity is reduced in proportion (spatial sampling: Waldspurger et al., "Efficient MRC
Construction with SHARDS", FAST 2015). LRU keeps whole prefixes, so a key that it keeps is a
hit, and the sample hits as often as the whole would.

Only differences are counted: blocks used again that are resident, but would not be under LRU,
against the opposite. If LRU is ahead by more than chance explains, ``follows_lru``
is set: the policy then evicts in LRU's order. After a while the prediction is tried again,
and each time that it loses, the while is twice as long.

A while is measured in turnovers: the time in which as many blocks are admitted as fit.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import compress
from math import exp, sqrt
from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.keys import GROUP_BYTES

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from kvtier.plugin_api.keys import Key

SAMPLE_BLOCKS: Final = 512
"""The sample's capacity, if the bounds of its share allow it."""

SHARE_MAX: Final = 64  #: 256ths of all keys. A larger share would cost too much time.

MEMORY_TURNOVERS: Final = 6.0
"""A difference this old counts a third as much as a new one."""

SURE: Final = 3.0
"""How many standard deviations LRU must be ahead: below that, it is chance."""

TURNOVERS_OF_LRU: Final = 4.0
"""How long LRU is followed after a trial that lasted longer than LRU had been followed before."""

TURNOVERS_OF_LRU_MAX: Final = 64.0


class Floor:
    """Decides whether LRU is the better choice at present."""

    def __init__(self, capacity: int) -> None:
        share = min(SHARE_MAX, max(1, SAMPLE_BLOCKS * 256 // max(1, capacity)))
        # The byte may be a counter's, so neighbours must not be in or out together.
        self._chosen = bytes([byte * 167 % 256 < share for byte in range(256)])
        self._capacity = max(1, round(capacity * share / 256))
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._lru: OrderedDict[Key, None] = OrderedDict()  # the next to go first
        self._since = 0  # sampled blocks admitted since LRU was last followed, or not
        self._while = TURNOVERS_OF_LRU
        self._lead = 0.0  # blocks that the prediction hit more than LRU
        self._spread = 0.0  # the variance of that, if both are equally good
        self.follows_lru = False

    def end_request(self, sampled: Sequence[Key], found: int, here: Container[Key]) -> None:
        """Count a request's hits, and those that LRU would have had, in its ``sampled`` keys.

        ``found``: how many of them it found resident; ``here``: those that are resident now.
        """
        lru = self._lru
        in_lru = sum(map(lru.__contains__, sampled))
        self._compare(found - in_lru)
        self._use([key for key in sampled if key in here or key in lru])

    def store(self, keys: Sequence[Key]) -> None:
        """Add resident keys that no request's order had, or that were stored after it ended."""
        self._use(self.sample(keys, b"".join(keys)))

    def forget(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.forget``."""
        for key in self.sample(keys, b"".join(keys)):
            self._lru.pop(key, None)

    def sample(self, keys: Sequence[Key], joined: bytes) -> list[Key]:
        """Return those of the keys that are sampled. ``joined``: the keys in a row."""
        if not keys:
            return []
        length = len(keys[0])
        place = length - GROUP_BYTES - 1
        if place >= 0 and len(joined) == length * len(keys):
            # A column of the joined keys: looking at each takes many times as long. Keys of
            # unequal length may pass for equal ones here, and are then sampled differently.
            return list(compress(keys, joined[place::length].translate(self._chosen)))
        return [
            key for key in keys if key and self._chosen[key[max(0, len(key) - GROUP_BYTES - 1)]]
        ]

    def _use(self, keys: list[Key]) -> None:
        """Make ``keys`` the newest in LRU, tails before heads, and evict the surplus."""
        lru = self._lru
        before = len(lru)
        for key in reversed(keys):
            lru[key] = None
            lru.move_to_end(key)
        new = len(lru) - before
        if not new:
            return
        for _ in range(len(lru) - self._capacity):
            lru.popitem(last=False)
        self._since += new
        kept = exp(-new / (MEMORY_TURNOVERS * self._capacity))
        self._lead *= kept
        self._spread *= kept

    def _compare(self, lead: int) -> None:
        """Add one request's ``lead``, its hits beyond those of LRU, and decide what to follow."""
        turnovers = self._since / self._capacity
        self._lead += lead
        self._spread += lead * lead
        if self.follows_lru:
            if turnovers > self._while:
                self._follow(lru=False)
        elif self._lead < -SURE * sqrt(self._spread) - 1.0:
            succeeded = turnovers > self._while
            longer = min(TURNOVERS_OF_LRU_MAX, 2.0 * self._while)
            self._while = TURNOVERS_OF_LRU if succeeded else longer
            self._follow(lru=True)

    def _follow(self, *, lru: bool) -> None:
        self.follows_lru = lru
        self._since = 0
        self._lead = self._spread = 0.0
