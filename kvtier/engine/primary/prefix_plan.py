"""Finds the longest prefix of tokens, across KV-cache groups, that fits the room.

A model with several groups needs the blocks of all of them up to one token:
with full attention every block of the prefix, with a sliding window (or a
recurrent state) the last ones. So blocks are considered together, by the token
that each ends at. One group at a time would fill the room with blocks of the
first group, and serve no prefix.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.core.group_messages import GroupKeys
    from kvtier.plugin_api.keys import Key


class Prefix(NamedTuple):
    """A prefix that fits, and its blocks in the order of the tokens that they end at."""

    tokens: int
    keys: tuple[Key, ...]


class Unknown(Exception):
    """Raised by ``cost`` for a block that tiers are being probed for."""


class _Prices:
    """The costs of one group's blocks, each computed once."""

    def __init__(self, group: GroupKeys, cost: Callable[[Key], int | None]) -> None:
        self.group = group
        self._cost = cost
        self._known: dict[Key, int | None] = {}
        self._sums = [0]  # of the first blocks, up to one that is unavailable
        self._is_whole = group.window is None

    def of(self, tokens: int) -> int | None:
        """Return the cost of the blocks needed for ``tokens``; None: one is unavailable."""
        needed = self.group.needed(tokens)
        if needed is None:
            return None
        if self._is_whole:
            self._sum_up()
            return self._sums[len(needed)] if len(needed) < len(self._sums) else None
        total = 0
        for key in needed:
            if key not in self._known:
                self._known[key] = self._cost(key)
            price = self._known[key]
            if price is None:
                return None
            total += price
        return total

    def _sum_up(self) -> None:
        if len(self._sums) > 1 or self._known:
            return
        for key in self.group.keys:
            price = self._known[key] = self._cost(key)
            if price is None:
                return
            self._sums.append(self._sums[-1] + price)


def longest_prefix(
    groups: Sequence[GroupKeys], cost: Callable[[Key], int | None], room: int
) -> Prefix | None:
    """Return the longest prefix whose blocks cost at most ``room``; None if not even one fits.

    ``cost`` of a block: None if it is unavailable.
    """
    prices = [_Prices(group, cost) for group in sorted(groups, key=_has_window)]
    ends = sorted({end for group in groups for end in group.ends}, reverse=True)
    for tokens in ends:
        total = 0
        for each in prices:
            price = each.of(tokens)
            if price is None or (total := total + price) > room:
                break
        else:
            parts = [group.needed(tokens) or () for group in groups]
            return Prefix(tokens, _by_position(groups, parts))
    return None


def _has_window(group: GroupKeys) -> bool:
    return group.window is not None


def _by_position(groups: Sequence[GroupKeys], parts: Sequence[tuple[Key, ...]]) -> tuple[Key, ...]:
    end_of = {key: end for group in groups for key, end in zip(group.keys, group.ends, strict=True)}
    return tuple(sorted((key for part in parts for key in part), key=end_of.__getitem__))


def storable(
    wanted: Sequence[Key], keys: Sequence[Key], cuts: Sequence[int] | None, room: int
) -> int:
    """Return how many of ``wanted``, from the first on, a store into ``room`` slots may take.

    ``wanted`` are some of ``keys``, in order. ``cuts``: how many of ``keys`` may
    be stored without those behind them, ascending; None: any number.
    """
    if room >= len(wanted) or cuts is None:
        return min(room, len(wanted))
    place = {key: number for number, key in enumerate(keys)}
    places = [place[key] for key in wanted]
    for cut in reversed(cuts):
        count = bisect_left(places, cut)
        if count <= room:
            return count
    return 0
