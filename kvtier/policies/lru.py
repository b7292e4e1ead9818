"""Least recently used, aware of requests.

A block is useless without its ancestors, so within one request tails go
before heads: for prefix trees that comes to evicting leaves only.

Keys stand in *runs*. A run holds what one request was the last to use, from
head to tail; runs stand in the order in which their requests last used
anything. The victim is the tail of the oldest run.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvtier.policies.base import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.messages import Key, RequestId

TAKEN_BACK: Final = ""
"""The run of keys that were chosen and then spared. No request has this name."""


class _Run:
    """The keys that one request was the last to use, from head to tail."""

    __slots__ = ("keys", "request")

    def __init__(self, request: RequestId) -> None:
        self.request = request
        self.keys: dict[Key, None] = {}


class LRUPolicy(EvictionPolicy):
    """Least recently used; tails before heads within a request."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._runs: OrderedDict[RequestId, _Run] = OrderedDict()
        self._run_of: dict[Key, _Run] = {}
        self._held: set[Key] = set()

    def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
        """See ``EvictionPolicy.admit``."""
        run = self._newest(request)
        run_of = self._run_of
        for key in keys:
            old = run_of.get(key)
            if old is run:
                continue
            if old is not None:
                self._leave(key)
            run.keys[key] = None
            run_of[key] = run
        if not run.keys:
            del self._runs[request]
        if held:
            self._held.update(keys)

    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        """See ``EvictionPolicy.touch``. A key keeps its place in its own request's run."""
        run = self._newest(request)
        run_of = self._run_of
        for key in keys:
            old = run_of.get(key)
            if old is None or old is run:
                continue
            del old.keys[key]
            if not old.keys:
                del self._runs[old.request]
            run.keys[key] = None
            run_of[key] = run
        if not run.keys:
            del self._runs[request]

    def hold(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.hold``."""
        self._held.update(keys)

    def unhold(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.unhold``."""
        self._held.difference_update(keys)

    def forget(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.forget``."""
        for key in keys:
            self._leave(key)
        self._held.difference_update(keys)

    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        """See ``EvictionPolicy.end_request``."""
        run = self._runs.get(request)
        if run is None:
            return
        self._runs.move_to_end(request)
        if order is not None:
            keys = run.keys
            for key in order:
                if key in keys:
                    del keys[key]
                    keys[key] = None

    def choose_victims(self, count: int, spare: Collection[Key]) -> list[Key]:
        """See ``EvictionPolicy.choose_victims``. Tails first, from the oldest run on."""
        victims: list[Key] = []
        for run in self._runs.values():
            if len(victims) >= count:
                break
            for key in reversed(run.keys):
                if key not in self._held and key not in spare:
                    victims.append(key)
                    if len(victims) >= count:
                        break
        for key in victims:
            self._leave(key)
        return victims

    def take_back(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.take_back``."""
        # They were chosen tail first, so the last of them stands nearest to the head.
        # One that was admitted again meanwhile has a newer place.
        back = [key for key in reversed(keys) if key not in self._run_of]
        if not back:
            return
        run = self._runs.get(TAKEN_BACK)
        if run is None:
            run = self._runs[TAKEN_BACK] = _Run(TAKEN_BACK)
        for key in back:
            run.keys[key] = None
            self._run_of[key] = run
        self._runs.move_to_end(TAKEN_BACK, last=False)

    def clear(self) -> None:
        """See ``EvictionPolicy.clear``."""
        self._runs.clear()
        self._run_of.clear()
        self._held.clear()

    def __len__(self) -> int:
        """See ``EvictionPolicy.__len__``."""
        return len(self._run_of)

    def __contains__(self, key: object) -> bool:
        """Tell whether the key is resident."""
        return key in self._run_of

    def _newest(self, request: RequestId) -> _Run:
        run = self._runs.get(request)
        if run is None:
            run = self._runs[request] = _Run(request)
        else:
            self._runs.move_to_end(request)
        return run

    def _leave(self, key: Key) -> None:
        """Take ``key`` out of its run, and the run out of the order once it is empty."""
        run = self._run_of.pop(key, None)
        if run is not None:
            del run.keys[key]
            if not run.keys:
                del self._runs[run.request]
