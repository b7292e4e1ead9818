"""Keeps the blocks most likely to be used again soonest, for the room they take.

Blocks form a prefix tree (``tree``): a block is useless without its
ancestors, so leaves go first. When a request ends, its path through the tree is
cut into nodes, and each node is put into a *cohort* (``cohorts``) by the
request's use of it: new blocks that begin, branch off, or continue a conversation;
blocks used again, and how often, and after which gap; the last block, which
is rarely full. ``model`` learns how soon each cohort is used again, and
``ghosts`` remembers evicted stretches, so that it learns from misses too.

Within a cohort the oldest node goes first; among the oldest nodes of all
cohorts, the one with the lowest Gittins index at its age. So a victim
costs no search: one lookup in an array of a few hundred cohorts for each node,
and nodes are stretches of many blocks.

A prediction can be wrong: ``floor`` counts the hits that LRU would have had. If those are
more, the oldest of those nodes goes, whatever its index.

Time is the runtime's clock if there is one. Otherwise it is the number of
admitted blocks, in 1024ths of the capacity.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.plugin_api.eviction_policy import EvictionPolicy
from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.policies.eviction.reuse.floor import Floor
from kvtier.policies.eviction.reuse.ghosts import Ghosts
from kvtier.policies.eviction.reuse.model import ReuseModel
from kvtier.policies.eviction.reuse.paths import Paths
from kvtier.policies.eviction.reuse.tree import PrefixTree, depth, keys_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.plugin_api.keys import Key, RequestId
    from kvtier.policies.eviction.reuse.tree import Node

LEARN_REQUESTS: Final = 64
"""The model is recomputed after this many requests; at first, after half as many as it has seen."""

LEARN_SHARE: Final = 32
"""Later, after one request for this many that it has seen: by then its values change little."""

LEARN_REQUESTS_MIN: Final = 8

LEARN_REQUESTS_MAX: Final = 512

TICK_WEIGHT: Final = 0.1
"""Weight of the last tick in the mean of requests per tick."""

LOOK_UNITS: Final = 0.25
"""The index of a cohort's oldest node is computed again after this time at the earliest."""

LOOK_BLOCKS: Final = 512
"""The same without a clock, in admitted blocks: a look costs as much as some dozen of them."""

LOOK_SHARE_MAX: Final = 1 / 16
"""And not before its age has grown by half the share by which its index exceeds the lowest, limited
to this share: an index falls no faster than an age grows. A limit of 1 instead of 1/16 cost half a
point of hits on the synthetic trace at 2 %."""

ENDED_MAX: Final = 64
"""Orders kept of requests that ended before all their blocks were stored (as in a slow tier)."""


RESTORED_INDEX: Final = -1.0  #: below all others


class _Running:
    """The nodes that a running request has used and brought."""

    __slots__ = ("began", "brought", "nodes")

    def __init__(self, began: int) -> None:
        self.began = began  #: when, in admitted blocks
        self.nodes: dict[Node, None] = {}
        self.brought: dict[bytes, Node] = {}  #: the node of its new blocks, by KV-cache group


class _Ended:
    """A request that ended when some of its blocks were not resident."""

    __slots__ = ("cohorts", "order")

    def __init__(self, order: Sequence[Key], cohorts: dict[bytes, int]) -> None:
        self.order = order
        self.cohorts = cohorts  #: of its new blocks, by KV-cache group


class ReusePolicy(EvictionPolicy):
    """Gittins' index over learnt cohorts; tails before heads."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._model = ReuseModel()
        self._cohorts = self._model.cohorts
        self._ghosts = Ghosts(capacity)
        self._floor = Floor(capacity)
        self._start()

    def _start(self) -> None:
        self._tree = PrefixTree(self._cohorts.count)
        self._paths = Paths(self._tree, self._model, self._ghosts)
        self._held: set[Key] = set()
        self._running: dict[RequestId, _Running] = {}
        self._ended: dict[RequestId, _Ended] = {}
        self._admitted = 0
        self._has_clock = False
        self._now = 0.0
        self._requests = 0
        self._tick = 0.0  # when the time was last passed in
        self._ended_since = 0  # requests
        self._ended_per_tick = 1.0  # a running mean
        self._learn_at = 16
        self._index = np.full(self._cohorts.count, np.inf)  # of the oldest node of each cohort
        self._due: list[tuple[float, int]] = []  # a heap: when to compute which index again
        self._is_due = bytearray(self._cohorts.count)
        self._step = LOOK_BLOCKS * 1024.0 / self.capacity  # shortest time until then
        self._lowest = 1.0  # index, of all at the last look
        self._follows_lru = False

    # --- calls that report events ---

    def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
        """See ``EvictionPolicy.admit``. New blocks stay aside until their request ends."""
        tree = self._tree
        new: Sequence[Key] = keys
        if not tree.node_of.keys().isdisjoint(keys):
            self.touch(keys, request)
            new = [key for key in keys if key not in tree.node_of]
        for chain in _chains(new, b"".join(new)):
            running = self._run(request)
            group = chain[0][-GROUP_BYTES:]
            node = running.brought.get(group)
            if node is None or node.uses or not node.keys:  # another request continued it
                node = running.brought[group] = tree.open(self._cohorts.unordered, self._now)
                running.nodes[node] = None
            tree.extend(node, chain)
            self._admitted += len(chain)
            if not self._has_clock:
                self._set_now(self._admitted * 1024.0 / self.capacity)
        if held:
            self._held.update(keys)

    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        """See ``EvictionPolicy.touch``. Counted once, when the request ends."""
        if not keys:
            return
        node_of = self._tree.node_of
        # Mostly many of them are in the first one's node.
        first = node_of.get(keys[0])
        rest = keys if first is None else keys[self._tree.common(first, list(keys), 0) :]
        nodes = {first, *map(node_of.get, rest)}
        nodes.discard(None)
        if nodes:
            mine = self._run(request).nodes
            for node in nodes:
                if node is not None and node not in mine:
                    mine[node] = None
                    node.busy += 1

    def hold(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.hold``."""
        self._held.update(keys)

    def unhold(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.unhold``."""
        self._held.difference_update(keys)

    def forget(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.forget``. They were not chosen, so they leave no ghosts."""
        self._tree.remove(keys)
        self._floor.forget(keys)
        self._held.difference_update(keys)

    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> None:
        """See ``EvictionPolicy.end_request``. Here its blocks are put into cohorts."""
        running = self._running.pop(request, None)
        ended = None
        if order:
            joined = b"".join(order)
            sampled = self._floor.sample(order, joined)
            if sampled:
                node_of = self._tree.node_of
                here = {key: node_of[key] for key in sampled if key in node_of}
                found = sum([1 for node in here.values() if node.uses])
                self._floor.end_request(sampled, found, here)
            self._use_order(request, _chains(order, joined), order)
        elif running is not None:
            ended = self._ended.get(request)
            if ended is not None:
                for chain in _chains(ended.order, b"".join(ended.order)):
                    self._paths.complete(chain, ended.cohorts[chain[0][-GROUP_BYTES:]])
        if running is not None:
            if not order:
                for node in running.brought.values():
                    self._floor.store(keys_of(node))
            self._stop(running, count_uses=order is None and ended is None)
        self._requests += 1
        if not self._has_clock:
            self._learn()
        else:
            self._ended_since += 1
            self._set_now(
                self._tick + self._ended_since / (self._ended_since + self._ended_per_tick)
            )

    def pass_time(self, now: float) -> None:
        """See ``EvictionPolicy.pass_time``. The first time replaces the count of blocks."""
        if not self._has_clock:
            self._has_clock = True
            self._step = LOOK_UNITS
            self._model.clear(now)
            self._ghosts.clear()
            self._tree.begin_time(now)
        more = self._ended_since - self._ended_per_tick
        self._ended_per_tick = max(1.0, self._ended_per_tick + TICK_WEIGHT * more)
        self._ended_since = 0
        self._tick = now
        self._set_now(now)
        self._learn()

    def clear(self) -> None:
        """See ``EvictionPolicy.clear``. Learnt gaps and chances stay."""
        has_clock, now, step = self._has_clock, self._now, self._step
        self._ghosts.clear()
        self._floor.clear()
        self._start()
        self._has_clock, self._step = has_clock, step
        self._tick = now
        self._set_now(now)

    def __len__(self) -> int:
        """See ``EvictionPolicy.__len__``."""
        return len(self._tree.node_of)

    def __contains__(self, key: object) -> bool:
        """Return whether the key is resident."""
        return key in self._tree.node_of

    # --- queries ---

    def choose_victims(self, count: int, exclude: Collection[Key]) -> list[Key]:
        """See ``EvictionPolicy.choose_victims``."""
        tree = self._tree
        if not isinstance(exclude, set | frozenset):
            exclude = frozenset(exclude)
        self._look()
        victims: list[Key] = []
        passed: list[Node] = []
        while len(victims) < count:
            node = self._most_dispensable()
            if node is None:
                break
            if node.children or node.busy:
                tree.put_aside(node)
                continue
            gone = tree.cut(node, count - len(victims), self._held, exclude)
            if gone:
                self._remember(node, gone[-1])
                victims += gone
            if not len(node.keys):
                tree.discard_empty(node)
            elif len(victims) < count:
                tree.put_aside(node)
                passed.append(node)
        for node in reversed(passed):
            tree.come_back(node)
        if len(victims) < count:
            victims += self._pop_anywhere(count - len(victims), exclude)
        return victims

    def restore(self, keys: Sequence[Key]) -> None:
        """See ``EvictionPolicy.restore``."""
        back = tuple([key for key in reversed(keys) if key not in self._tree.node_of])
        if back:
            cohort = self._cohorts.restored
            self._tree.place(self._tree.add(back, cohort, self._now), cohort, self._now)

    # --- a chain of blocks that a request used ---

    def _use_order(self, request: RequestId, chains: list[list[Key]], order: Sequence[Key]) -> None:
        cohorts: dict[bytes, int] = {}
        any_absent = False
        for chain in chains:
            cohort, absent = self._paths.use(chain)
            cohorts[chain[0][-GROUP_BYTES:]] = cohort
            any_absent = any_absent or absent
        if any_absent:
            self._ended[request] = _Ended(order, cohorts)
            if len(self._ended) > ENDED_MAX:
                del self._ended[next(iter(self._ended))]

    def _set_now(self, now: float) -> None:
        self._now = now
        self._paths.set_now(now)

    def _learn(self) -> None:
        """Recompute the model if it is due. With a clock, no request's call does this."""
        if self._requests >= self._learn_at:
            seen = self._requests
            often = min(LEARN_REQUESTS_MAX, max(LEARN_REQUESTS, seen // LEARN_SHARE))
            self._learn_at = seen + min(often, max(LEARN_REQUESTS_MIN, seen // 2))
            self._model.refresh(self._now)

    # --- requests that run ---

    def _run(self, request: RequestId) -> _Running:
        """Return a running request's record. Ends the oldest after a turnover: it may never end."""
        running = self._running.get(request)
        if running is None:
            oldest = next(iter(self._running), None)
            if oldest is not None and self._running[oldest].began < self._admitted - self.capacity:
                self.end_request(oldest, None)
            running = self._running[request] = _Running(self._admitted)
        return running

    def _stop(self, running: _Running, *, count_uses: bool) -> None:
        """Release a request's nodes, and place those whose order is unknown."""
        tree = self._tree
        for node in running.nodes:
            if count_uses or not node.uses:
                self._paths.use_node(node)
            tree.release(node)

    # --- victims ---

    def _look(self) -> None:
        """Mark the cohorts whose index is due: their oldest node aged, or the order has changed."""
        changed, due = self._tree.changed, self._due
        if self._follows_lru != self._floor.follows_lru:
            self._follows_lru = self._floor.follows_lru
            changed.update(np.flatnonzero(self._index != np.inf).tolist())
        while due and due[0][0] <= self._now:
            _, cohort = heappop(due)
            changed.add(cohort)
            self._is_due[cohort] = 0

    def _most_dispensable(self) -> Node | None:
        """Return the node with the lowest index, of those that are the oldest of a cohort.

        If LRU is followed the index is the last use: queues stand in that order.
        """
        tree, index, now = self._tree, self._index, self._now
        for cohort in tree.changed:
            node = tree.first_of(cohort)
            if node is None:
                index[cohort] = np.inf
            elif cohort == self._cohorts.restored:
                index[cohort] = RESTORED_INDEX
            elif self._follows_lru:
                index[cohort] = node.used
            else:
                age = now - node.used
                index[cohort] = value = self._model.index_of(cohort, age)
                if not self._is_due[cohort]:
                    self._is_due[cohort] = 1
                    wait = age * min(LOOK_SHARE_MAX, 0.5 * (value / self._lowest - 1.0))
                    heappush(self._due, (now + max(self._step, wait), cohort))
        tree.changed.clear()
        cohort = int(index.argmin())
        if not self._follows_lru:
            self._lowest = max(1e-9, float(index[cohort]))
        return tree.first_of(cohort)

    def _remember(self, node: Node, head: Key) -> None:
        """Leave a ghost of all blocks that ``node`` has lost from its tail; ``head``: the first."""
        share = min(1.0, node.lost / node.placed)
        self._ghosts.remember(head, node.cohort, share, node.lost, node.used)

    def _pop_anywhere(self, count: int, exclude: set[Key] | frozenset[Key]) -> list[Key]:
        """Remove and return up to ``count`` keys in any order: room matters more than order."""
        tree, held = self._tree, self._held
        gone: list[Key] = []
        nodes = [(n.busy > 0, n.used, -depth(n), at, n) for at, n in enumerate(tree.nodes())]
        for *_, node in sorted(nodes):
            if len(gone) >= count:
                break
            gone += tree.cut(node, count - len(gone), held, exclude)
            tree.discard_empty(node)
            if len(gone) < count and len(node.keys):  # go on behind one that must stay
                may_go = [k for k in reversed(keys_of(node)) if k not in held and k not in exclude]
                del may_go[count - len(gone) :]
                tree.remove(may_go)
                gone += may_go
        return gone


def _chains(keys: Sequence[Key], joined: bytes) -> list[list[Key]]:
    """Return the chains in ``keys``, one for each KV-cache group. ``joined``: the keys in a row."""
    if not keys:
        return []
    length, count = len(keys[0]), len(keys)
    if len(joined) == length * count and all(
        # A column of the joined keys at a time: slicing each key takes five times as long.
        joined[place::length].count(joined[place]) == count
        for place in range(max(0, length - GROUP_BYTES), length)
    ):
        return [list(keys)]
    chains: dict[bytes, list[Key]] = {}
    for key in keys:
        chains.setdefault(key[-GROUP_BYTES:], []).append(key)
    return list(chains.values())
