"""Tracks blocks that a backend with a capacity may have, but its tier doesn't count.

Each such block takes room that is never freed: victims are chosen among
counted blocks only. So it is removed. There are four kinds: blocks found
from before that no longer fit, blocks that a failed store may have kept all the same,
victims whose removal failed, and damaged blocks, whose removal may have failed.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.backend import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvtier.plugin_api.keys import Key

REMOVE_BLOCKS_MAX: Final = 512
"""Keys removed in one call, with one call at a time: stores run beside it."""


class Leftovers:
    """Keys to remove, with one batch in flight at a time."""

    def __init__(self) -> None:
        self._keys: dict[Key, None] = {}
        self._under_way: tuple[Key, ...] = ()
        self._doubtful: set[Key] = set()  # being stored, and perhaps already there
        self.is_deferred = False  #: until the next store, because a failing medium is busy enough

    def __contains__(self, key: Key) -> bool:
        """Return whether the key waits for its removal."""
        return key in self._keys

    def __iter__(self) -> Iterator[Key]:
        """Return the keys in flight, then the waiting ones."""
        yield from self._under_way
        yield from self._keys

    def add(self, keys: Iterable[Key]) -> None:
        """Have these removed."""
        self._keys.update(dict.fromkeys(keys))

    def defer(self, keys: Iterable[Key]) -> None:
        """Have these removed by the next store, which needs the room."""
        before = len(self._keys)
        self._keys.update(dict.fromkeys(keys))
        self.is_deferred = self.is_deferred or len(self._keys) > before

    def wanted(self, keys: Sequence[Key]) -> None:
        """Note that these are stored now: an existing copy may stay, if that ends well."""
        if self._keys:
            again = [key for key in keys if key in self._keys]
            self._doubtful.update(again)
            for key in again:
                del self._keys[key]

    def doubt(self, keys: Iterable[Key]) -> None:
        """Note that a store of these failed, and may have kept them."""
        self._doubtful.update(keys)

    def settle(self, keys: Iterable[Key]) -> list[Key]:
        """Return which of these may be there, now that no store of them is in flight."""
        if not self._doubtful:
            return []
        found = [key for key in keys if key in self._doubtful]
        self._doubtful.difference_update(found)
        return found

    def pop_deferred(self) -> tuple[Key, ...]:
        """Return a batch for a store to remove first, none if nothing was deferred."""
        if not self.is_deferred:
            return ()
        self.is_deferred = False
        return self._pop_batch()

    def begin_removal(self) -> tuple[Key, ...]:
        """Return the next batch to remove, none if none may be removed now."""
        if self._under_way or self.is_deferred or not self._keys:
            return ()
        self._under_way = self._pop_batch()
        return self._under_way

    def end_removal(self, outcomes: Sequence[Outcome]) -> None:
        """Note the batch's outcomes. Failed removals are retried later."""
        keys, self._under_way = self._under_way, ()
        failed = [k for k, end in zip(keys, outcomes, strict=True) if end is not Outcome.DONE]
        self.defer(failed)

    def _pop_batch(self) -> tuple[Key, ...]:
        keys = tuple(islice(self._keys, REMOVE_BLOCKS_MAX))
        for key in keys:
            del self._keys[key]
        return keys


class Unannounced:
    """Tracks earlier blocks that are gone before they were announced to the tier.

    A backend may have listed its blocks when it was opened. Blocks
    removed since would count as there, for ever if no request loads them.
    """

    def __init__(self) -> None:
        self._gone: set[Key] | None = set()  # None: everything has been announced

    def removed(self, keys: Iterable[Key]) -> None:
        """Note that these are being removed, or are lost."""
        if self._gone is not None:
            self._gone.update(keys)

    def stored(self, keys: Iterable[Key], outcomes: Iterable[Outcome]) -> None:
        """Note which of these are there again."""
        if self._gone:
            ends = zip(keys, outcomes, strict=True)
            self._gone.difference_update(key for key, end in ends if end is Outcome.DONE)

    def still_there(self, keys: Sequence[Key]) -> tuple[Key, ...]:
        """Return the keys that may be announced."""
        if not self._gone:
            return tuple(keys)
        return tuple(key for key in keys if key not in self._gone)

    def end(self) -> None:
        """Note that everything has been announced."""
        self._gone = None

    def is_over(self) -> bool:
        """Return whether everything has been announced."""
        return self._gone is None
