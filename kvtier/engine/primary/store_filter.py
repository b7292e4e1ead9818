"""Admits a block to the primary tier only once it was offered often enough.

vLLM's ``store_threshold``: most blocks are never used again, and a second
offer of a block shows that this one is.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtier.core.statistics import PrimaryCounts
    from kvtier.plugin_api.keys import Key


class StoreFilter:
    """Counts offers of up to ``max_tracker_size`` keys; forgets the least recently offered."""

    def __init__(self, threshold: int, max_tracker_size: int) -> None:
        self._threshold = threshold
        self._max_tracker_size = max_tracker_size
        self._offers: OrderedDict[Key, int] = OrderedDict()

    @classmethod
    def if_wanted(cls, threshold: int, max_tracker_size: int) -> StoreFilter | None:
        """Return a filter; None if the first offer is enough."""
        return cls(threshold, max_tracker_size) if threshold > 1 else None

    def keep(self, wanted: Iterable[Key], offered: Iterable[Key]) -> list[Key]:
        """Count an offer of each key of ``offered``.

        Return the keys of ``wanted``, a subset, that were offered
        ``threshold`` times or more.
        """
        often = set()
        offers = self._offers
        for key in offered:
            count = offers.get(key, 0) + 1
            offers[key] = count
            offers.move_to_end(key)
            if count >= self._threshold:
                often.add(key)
        while len(offers) > self._max_tracker_size:
            offers.popitem(last=False)
        return [key for key in wanted if key in often]


def wanted_of(
    keys: Sequence[Key],
    slot_of: Mapping[Key, int],
    often: StoreFilter | None,
    counts: PrimaryCounts,
) -> list[Key]:
    """Return the keys of an offer to store, each once; count those not offered often enough."""
    new = new_keys(keys, slot_of)
    if often is None:
        return new
    wanted = often.keep(new, keys)
    counts.stores_skipped += len(new) - len(wanted)
    return wanted


def new_keys(keys: Sequence[Key], slot_of: Mapping[Key, int]) -> list[Key]:
    """Return the keys that have no slot, each once."""
    if slot_of.keys().isdisjoint(keys) and len(frozenset(keys)) == len(keys):
        return list(keys)  # the usual case, in half the time
    return [key for key in dict.fromkeys(keys) if key not in slot_of]
