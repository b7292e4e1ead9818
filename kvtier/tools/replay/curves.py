"""Replays a trace through eviction policies alone: hit ratio against capacity.

There is one cache of ``capacity`` blocks, and no operation takes time. A request hits the longest
run of resident blocks from its start; then all its
blocks are resident, from the head on as far as they fit. The policies are the
ones that the runtime uses, called in the order in which the runtime calls them.

``MIN`` is the best possible policy, which knows the future: after each
request it keeps the blocks whose next use is nearest, deeper ones going first
among equals. It may leave out a block of the request at hand (a bypass). A block's next use is
never later than that of a block behind it, so it always keeps whole prefixes.
"""

from __future__ import annotations

import re
from heapq import heappop, heappush
from importlib.metadata import entry_points
from time import thread_time
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import ConfigError, InternalError
from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.settings.plugins import POLICIES, make_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.plugin_api.eviction_policy import EvictionPolicy
    from kvtier.plugin_api.keys import Key
    from kvtier.tools.replay.traces import Trace

REPORT: Final = "kvtier replay --policies"
"""Type of the JSON report of a comparison, in the report."""

MIN: Final = "MIN"
ALL: Final = "all"
CAPACITIES_MAX: Final = 100

_GROUP: Final = bytes(GROUP_BYTES)


class CurvePoint(NamedTuple):
    """Result of one policy at one capacity."""

    capacity_blocks: int
    hits: int  #: blocks
    hit_ratio: float  #: of the referenced blocks
    seconds: float  #: CPU time of the replay


class Workload:
    """A trace, prepared for many replays."""

    def __init__(self, trace: Trace) -> None:
        if not trace.references:
            raise ConfigError(f"{trace.path}: no request has a whole block: nothing to replay.")
        self.distinct_blocks = trace.distinct_blocks
        self.references = trace.references
        key_of: dict[int, Key] = {}
        for request in trace.requests:
            for block in request.blocks:
                if block not in key_of:
                    key_of[block] = block.to_bytes(8) + _GROUP
        self.requests: list[tuple[int, list[Key]]] = [
            (int(request.time_s), [key_of[block] for block in request.blocks])
            for request in trace.requests
        ]
        self._next_uses: list[list[int]] | None = None

    def next_uses(self) -> list[list[int]]:
        """For each block of each request: the next request that uses it, or -1."""
        if self._next_uses is None:
            next_use: dict[Key, int] = {}
            found = []
            for number in range(len(self.requests) - 1, -1, -1):
                keys = self.requests[number][1]
                found.append([next_use.get(key, -1) for key in keys])
                next_use.update(dict.fromkeys(keys, number))
            found.reverse()
            self._next_uses = found
        return self._next_uses

    def endless_hit_ratio(self) -> float:
        """The hit ratio of a cache that never evicts."""
        return (self.references - self.distinct_blocks) / self.references


def installed_policies() -> list[str]:
    """Return the names of all installed eviction policies."""
    return sorted(entry_points(group=POLICIES).names)


def parse_policies(text: str) -> list[str]:
    """Return the policies that ``a,b`` or ``all`` names. Raises ``ConfigError``."""
    if text == ALL:
        return installed_policies()
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"policies={text!r} names none. Give names, or {ALL}.")
    for name in names:
        make_policy(name, 1)
    return names


def parse_capacities(text: str, distinct_blocks: int) -> list[int]:
    """Return the capacities, in blocks and rising, that ``1%,5%,2000`` names.

    A share is one of the trace's distinct blocks, and at least one of them.
    Raises ``ConfigError``.
    """
    capacities = set()
    for part in (part.strip() for part in text.split(",")):
        found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(%?)", part)
        number = float(found[1]) if found else 0.0
        if number and found and found[2]:
            number = max(1, round(distinct_blocks * number / 100))
        if number < 1 or number != int(number):
            raise ConfigError(
                f"capacities={text!r}: {part!r} is neither a number of blocks nor a share of the "
                f"trace's {distinct_blocks:,} blocks. Write 2000, or 5%."
            )
        capacities.add(int(number))
    if len(capacities) > CAPACITIES_MAX:
        raise ConfigError(f"capacities={text!r} are more than {CAPACITIES_MAX}. Give fewer.")
    return sorted(capacities)


def replay(
    workload: Workload, policy: str, capacity: int, on_request: Callable[[], None] = lambda: None
) -> CurvePoint:
    """Replay under ``policy``, or under ``MIN``. ``on_request`` is called after each request."""
    start = thread_time()
    if policy == MIN:
        hits = _replay_min(workload, capacity, on_request)
    else:
        hits = _Cache(policy, make_policy(policy, capacity)).replay(workload, on_request)
    return CurvePoint(capacity, hits, hits / workload.references, thread_time() - start)


class _Cache:
    """One cache and its policy; calls the policy as the primary tier does."""

    def __init__(self, name: str, policy: EvictionPolicy) -> None:
        self._name = name
        self._policy = policy
        self._capacity = policy.capacity
        self._resident: set[Key] = set()

    def replay(self, workload: Workload, on_request: Callable[[], None]) -> int:
        """Play all requests; return how many blocks were hit."""
        hits = 0
        second = -1
        for number, (time_s, keys) in enumerate(workload.requests):
            if time_s > second:
                second = time_s
                self._policy.pass_time(float(time_s))
            hits += self._serve(str(number), keys)
            on_request()
        return hits

    def _serve(self, request: str, keys: Sequence[Key]) -> int:
        policy, resident = self._policy, self._resident
        hits = 0
        for key in keys:
            if key not in resident:
                break
            hits += 1
        if hits:
            policy.touch(keys[:hits], request)
        head = keys[hits : self._capacity]
        missing = [key for key in head if key not in resident]
        if len(missing) < len(head):
            policy.touch([key for key in head if key in resident], request)
        self._make_room(len(resident) + len(missing) - self._capacity, keys)
        stored = missing[: self._capacity - len(resident)]
        if stored:
            resident.update(stored)
            policy.admit(stored, request, held=True)
            policy.unhold(stored)
        policy.end_request(request, keys)
        return hits

    def _make_room(self, count: int, keys: Sequence[Key]) -> None:
        """Evict ``count`` blocks, none of those of ``keys`` that fit."""
        if count <= 0:
            return
        resident = self._resident
        exclude = frozenset(keys[: self._capacity])
        victims = self._policy.choose_victims(count, exclude)
        left = len(resident) - len(victims)
        resident.difference_update(victims)
        if len(resident) != left or len(victims) > count or not exclude.isdisjoint(victims):
            raise InternalError(
                f"eviction policy {self._name} chose blocks that were not its to choose: not "
                "resident, excluded, or more than asked for. Report it to the policy's author."
            )


def _replay_min(workload: Workload, capacity: int, on_request: Callable[[], None]) -> int:
    """Replay with the furthest next use evicted; return how many blocks were hit.

    Blocks that are never used again are not kept at all, which hits the same.
    """
    hits = 0
    next_of: dict[Key, int] = {}  # of the resident blocks
    furthest: list[tuple[int, int, Key]] = []  # a heap; may hold outdated entries
    for (_, keys), next_uses in zip(workload.requests, workload.next_uses(), strict=True):
        for depth, (key, next_use) in enumerate(zip(keys, next_uses, strict=True)):
            if next_of.pop(key, None) is not None:
                hits += 1
            if next_use >= 0:
                next_of[key] = next_use
                heappush(furthest, (-next_use, -depth, key))
        while len(next_of) > capacity:
            next_use, _, key = heappop(furthest)
            if next_of.get(key) == -next_use:
                del next_of[key]
        on_request()
    return hits
