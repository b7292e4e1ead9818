"""Keeps keys in runs: the order that the classic policies evict in.

A block is useless without its ancestors, so within one request tails go
before heads: for prefix trees that amounts to evicting leaves only.

Keys are in *runs*. A run holds, from head to tail, the keys that one request put there; runs are
ordered by their stamps. The next victim is the tail of the oldest run.

A held key is visited once: on the way to a victim it is set aside behind the tail of its run. Once
unheld, it is the next victim of that run, and it stays at the tail when its request uses other
keys.

At a million keys nothing here may slow the garbage collector down. It does
not track a dict of bytes, numbers, None and ``Run``; it would walk through an
OrderedDict, or a list for each run. So runs are not linked but found by their
stamps, which only grow.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.plugin_api.keys import Key, RequestId


def hold(held: dict[Key, None], keys: Collection[Key]) -> None:
    """Add keys to the held ones: in a dict, since the collector walks through a set too."""
    if len(held) < len(keys):
        held.update(dict.fromkeys(keys))  # makes room in one go
        return
    for key in keys:
        held[key] = None


def unhold(held: dict[Key, None], keys: Collection[Key]) -> None:
    """Remove keys, if they are there, from the held ones."""
    for key in keys:
        held.pop(key, None)


class Run(Struct, gc=False, eq=False):
    """Keys from head to tail; ``aside``: those met while held, from tail to head."""

    stamp: int
    request: RequestId | None  #: None: it is over, or the run belongs to none
    keys: dict[Key, None]
    aside: dict[Key, None] | None = None


class Runs:
    """Keys in runs, the oldest run first. Those in ``held`` are never popped."""

    def __init__(self, held: Collection[Key] = ()) -> None:
        self.run_of: dict[Key, Run] = {}
        self._held = held
        self._at: dict[int, Run] = {}  # by stamp
        self._open: dict[RequestId, Run] = {}  # of requests that are not over
        self._first = 0  # stamp; no run has an older one
        self._newest = 0  # stamp
        self._front = 1  # stamp; older runs with keys to give are in _early
        self._early: list[int] = []  # heap of stamps; their runs may be gone
        self._is_early: set[int] = set()
        self._aside_count = 0

    def __len__(self) -> int:
        """Return how many keys there are."""
        return len(self.run_of)

    def __contains__(self, key: object) -> bool:
        """Return whether the key is here."""
        return key in self.run_of

    def isdisjoint(self, keys: Collection[Key]) -> bool:
        """Return whether none of the keys is here."""
        return self.run_of.keys().isdisjoint(keys)

    def open(self, request: RequestId) -> Run | None:
        """Return the run of a request that is not over, if it has one."""
        return self._open.get(request)

    # --- putting keys in ---

    def put(self, keys: Collection[Key], request: RequestId | None) -> None:
        """Put keys at the tail of the request's run, which becomes the newest.

        Those in other runs leave them; those in this one keep their places.
        Without a request the run is a new one.
        """
        self._put(keys, self._make_newest(request))

    def put_first(self, keys: Collection[Key]) -> None:
        """Put keys, given from head to tail, where they are the next to go."""
        if keys:
            self._first -= 1
            run = self._at[self._first] = Run(self._first, None, {})
            self._comes_early(run)
            self._put(keys, run)

    def use(self, keys: Sequence[Key], request: RequestId) -> None:
        """Put those of the keys that are here into the request's run, as ``put`` does."""
        if not self._adopt_whole(keys, request):
            run = self._make_newest(request)
            # A load follows a touch of the same keys: then all are in their places.
            if not all(map(run.keys.__contains__, keys)):
                self._move(keys, run)
            self._drop_if_empty(run)

    def end(self, request: RequestId, order: Sequence[Key] | None) -> None:
        """Close the request's run, after it has used ``order``.

        It ends in the keys of ``order`` that are here, in that order.
        """
        if order is None and request not in self._open:
            return
        if order is not None:
            self._adopt_whole(order, request)
        run = self._make_newest(request)
        if order is not None and tuple(run.keys) != tuple(order):
            self._move(order, run, reorder=True)
        del self._open[request]
        run.request = None
        self._drop_if_empty(run)

    def _put(self, keys: Collection[Key], run: Run) -> None:
        run_of = self.run_of
        if self.isdisjoint(keys):
            # Of a dict, Python copies the hashes too.
            run.keys.update(keys if isinstance(keys, dict) else dict.fromkeys(keys))
            for key in keys:  # update() needs a dict of them first, which takes longer
                run_of[key] = run
        else:
            self._move(keys, run, new=True)
        self._drop_if_empty(run)

    def _move(
        self, keys: Collection[Key], run: Run, *, new: bool = False, reorder: bool = False
    ) -> None:
        """Move keys to the tail of ``run``.

        ``new``: also keys in no run. ``reorder``: also keys of this very run.
        """
        run_of = self.run_of
        own = run.keys
        for key in keys:
            old = run_of.get(key)
            if old is run:
                if reorder:
                    del own[key]
                    own[key] = None
                continue
            if old is not None:
                try:
                    del old.keys[key]
                except KeyError:
                    self._leave_aside(key, old)
                if not old.keys:
                    self._drop_if_empty(old)
            elif not new:
                continue
            own[key] = None
            run_of[key] = run

    def _make_newest(self, request: RequestId | None) -> Run:
        """Return the request's run, now the newest. The caller drops it if it stays empty."""
        run = None if request is None else self._open.get(request)
        if run is None:
            self._newest += 1
            run = self._at[self._newest] = Run(self._newest, request, {})
            if request is not None:
                self._open[request] = run
            return run
        self._renew(run)
        return run

    def _adopt_whole(self, keys: Sequence[Key], request: RequestId) -> bool:
        """Give a run of just these keys to a request without one, as in a chat's next turn.

        The result is that of ``_move``, in a tenth of the time.
        """
        if not keys or request in self._open:
            return False
        run = self.run_of.get(keys[0])
        if run is None or run.aside or tuple(run.keys) != tuple(keys):
            return False
        if run.request is not None:
            del self._open[run.request]
        run.request = request
        self._open[request] = run
        self._renew(run)
        return True

    def _renew(self, run: Run) -> None:
        """Make the run the newest, and return its set-aside keys to it."""
        if run.aside:
            run.keys.update(dict.fromkeys(reversed(run.aside)))
            self._aside_count -= len(run.aside)
            run.aside = None
        if run.stamp < self._newest or run.stamp < self._front:
            del self._at[run.stamp]
            self._newest += 1
            run.stamp = self._newest
            self._at[run.stamp] = run

    def _comes_early(self, run: Run) -> None:
        """Note that a run which may have been passed has keys to give."""
        stamp = run.stamp
        if stamp < self._front and stamp not in self._is_early:
            heappush(self._early, stamp)
            self._is_early.add(stamp)

    # --- removing keys ---

    def pop(self, count: int, exclude: Collection[Key]) -> list[Key]:
        """Remove and return up to ``count`` keys, the next to go first.

        None of them is held or in ``exclude``.
        """
        popped: list[Key] = []
        passed: list[Run] = []
        while len(popped) < count:
            run = self._oldest()
            if run is None:
                break
            self._pop_from(run, count - len(popped), exclude, popped)
            if not run.keys:
                self._drop_if_empty(run)
            elif len(popped) < count:
                self._pass(run)
                passed.append(run)
        for run in passed:
            self._comes_early(run)
        return popped

    def drop(self, keys: Collection[Key]) -> None:
        """Remove these keys, if they are here."""
        for key in keys:
            run = self.run_of.pop(key, None)
            if run is None:
                continue
            try:
                del run.keys[key]
            except KeyError:
                self._leave_aside(key, run)
            if not run.keys:
                self._drop_if_empty(run)

    def clear(self) -> None:
        """Remove all keys."""
        self.run_of.clear()
        self._at.clear()
        self._open.clear()
        self._early.clear()
        self._is_early.clear()
        self._aside_count = 0

    def _oldest(self) -> Run | None:
        """Return the oldest run that may have keys to give."""
        at = self._at
        while self._early:
            run = at.get(self._early[0])
            if run is not None and run.keys:
                return run
            self._is_early.remove(heappop(self._early))
        while self._front <= self._newest:
            run = at.get(self._front)
            if run is not None and run.keys:
                return run
            self._front += 1
        return None

    def _pass(self, run: Run) -> None:
        """Go on to the run after ``run``, which is the oldest."""
        if run.stamp == self._front:
            self._front += 1
        else:
            self._is_early.remove(heappop(self._early))

    def _pop_from(self, run: Run, count: int, exclude: Collection[Key], popped: list[Key]) -> None:
        """Remove up to ``count`` keys of one run, and set aside those that are held."""
        keys = run.keys
        held = self._held
        if len(keys) <= count and keys.keys().isdisjoint(held) and keys.keys().isdisjoint(exclude):
            found = list(reversed(keys))
            keys.clear()
        else:
            found = []
            excluded = []
            while keys and len(found) < count:
                key, _ = keys.popitem()
                if key in held:
                    self._set_aside(key, run)
                elif key in exclude:
                    excluded.append(key)
                else:
                    found.append(key)
            keys.update(dict.fromkeys(reversed(excluded)))
        for key in found:
            del self.run_of[key]
        popped += found

    def _drop_if_empty(self, run: Run) -> None:
        if not run.keys and not run.aside:
            del self._at[run.stamp]
            if run.request is not None:
                del self._open[run.request]

    # --- held keys ---

    def unheld(self, keys: Collection[Key]) -> None:
        """Learn that these keys are no longer held."""
        if not self._aside_count:
            return
        for key in keys:
            run = self.run_of.get(key)
            if run is not None and run.aside and key in run.aside:
                self._leave_aside(key, run)
                self._comes_early(run)
                run.keys[key] = None

    def _set_aside(self, key: Key, run: Run) -> None:
        if run.aside is None:
            run.aside = {}
        run.aside[key] = None
        self._aside_count += 1

    def _leave_aside(self, key: Key, run: Run) -> None:
        assert run.aside is not None
        del run.aside[key]
        self._aside_count -= 1
