"""Keeps the blocks most likely to be used again soonest, for the room they take.

Blocks form a prefix tree (``reuse_tree``): a block is useless without its
ancestors, so leaves go first. When a request ends, its path through the tree is
cut into nodes, and each node is put into a *cohort* (``reuse_cohorts``) by the
request's use of it: new blocks that begin, branch off, or continue a conversation;
blocks used again, and how often, and after which gap; the last block, which
is rarely full. ``reuse_model`` learns how soon each cohort is used again, and
``reuse_ghosts`` remembers evicted stretches, so that it learns from misses too.

Within a cohort the oldest node goes first. Among the oldest nodes of all
cohorts it is the one with the lowest Gittins index at its age. So a victim
costs no search: one lookup in an array of a few hundred cohorts for each node,
and nodes are stretches of many blocks.

A prediction can be wrong: ``floor`` counts the hits that LRU would have had. If those are
more, the oldest of those nodes goes, whatever its index.

Time is the runtime's clock if there is one. Otherwise it is the number of
admitted blocks, in 1024ths of the capacity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.plugin_api.eviction_policy import EvictionPolicy
from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.policies.eviction.reuse.floor import Floor
from kvtier.policies.eviction.reuse.ghosts import Ghosts
from kvtier.policies.eviction.reuse.model import ReuseModel
from kvtier.policies.eviction.reuse.paths import Paths
from kvtier.policies.eviction.reuse.tree import NO_NODE, PrefixTree

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtier.plugin_api.keys import Key, RequestId

LEARN_REQUESTS: Final = 64
"""The model is recomputed after this many requests, or half as many as it has seen."""

LEARN_SHARE: Final = 32
"""Later it is after one request for so many that it has seen: well-known values stay."""

LEARN_REQUESTS_MIN: Final = 8

LEARN_REQUESTS_MAX: Final = 512

TICK_WEIGHT: Final = 0.1
"""Weight of the last tick in the mean of requests per tick."""

LOOK_UNITS: Final = 0.25
"""Ages of the oldest nodes are looked at again after this time."""

LOOK_BLOCKS: Final = 512
"""The same without a clock, in admitted blocks: a look costs as much as some dozen of them."""

ENDED_MAX: Final = 64
"""Orders kept of requests that ended before all their blocks were stored (as in a slow tier)."""


RESTORED_INDEX: Final = -1.0  #: below all others


class _Running:
    """The nodes that a running request has used and brought."""

    __slots__ = ("began", "brought", "nodes")

    def __init__(self, began: int) -> None:
        self.began = began  #: when, in admitted blocks
        self.nodes: set[int] = set()
        self.brought: dict[bytes, int] = {}  #: the node of its new blocks, by KV-cache group


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
        self._looked_at = -1.0
        self._follows_lru = False
        self._index = np.full(self._cohorts.count, np.inf)

    # --- calls that report events ---

    def admit(self, keys: Sequence[Key], request: RequestId, *, held: bool) -> None:
        """See ``EvictionPolicy.admit``. New blocks stay aside until their request ends."""
        tree = self._tree
        new: Sequence[Key] = keys
        if not tree.node_of.keys().isdisjoint(keys):
            self.touch(keys, request)
            new = [key for key in keys if key not in tree.node_of]
        for chain in _chains(new):
            running = self._run(request)
            group = chain[0][-GROUP_BYTES:]
            node = running.brought.get(group, NO_NODE)
            if node == NO_NODE or not tree.is_open(node):  # another request continued it
                node = running.brought[group] = tree.open(self._cohorts.unordered, self._now)
                running.nodes.add(node)
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
        tree = self._tree
        # Mostly many of them are in the first one's node.
        first, end = tree.run(list(keys), 0)
        nodes = {first, *map(tree.node_of.get, keys[end:])}
        nodes -= {None, NO_NODE}
        if nodes:
            mine = self._run(request).nodes
            for node in nodes:
                if node is not None and node not in mine:
                    mine.add(node)
                    tree.use(node)

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
            is_here = self._tree.node_of.__contains__
            self._floor.end_request(order, self._count_found, is_here)
            self._use_order(request, order)
        elif running is not None:
            ended = self._ended.get(request)
            if ended is not None:
                for chain in _chains(ended.order):
                    self._paths.complete(chain, ended.cohorts[chain[0][-GROUP_BYTES:]])
        if running is not None:
            if not order:
                for node in running.brought.values():
                    self._floor.store(self._tree.keys_of(node))
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
            self._model.clear(now)
            self._ghosts.clear()
            self._tree.set_used(now)
            self._looked_at = -1.0
        more = self._ended_since - self._ended_per_tick
        self._ended_per_tick = max(1.0, self._ended_per_tick + TICK_WEIGHT * more)
        self._ended_since = 0
        self._tick = now
        self._set_now(now)
        self._learn()

    def clear(self) -> None:
        """See ``EvictionPolicy.clear``. Learnt gaps and chances stay."""
        has_clock, now = self._has_clock, self._now
        self._ghosts.clear()
        self._floor.clear()
        self._start()
        self._has_clock = has_clock
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
        passed: list[int] = []
        while len(victims) < count:
            node = self._most_dispensable()
            if node == NO_NODE:
                break
            if tree.children[node] or tree.busy[node]:
                tree.put_aside(node)
                continue
            gone = tree.cut(node, count - len(victims), self._held, exclude)
            if gone:
                self._remember(node)
                victims += gone
            if tree.size[node] == 0:
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

    def _use_order(self, request: RequestId, order: Sequence[Key]) -> None:
        cohorts: dict[bytes, int] = {}
        any_absent = False
        for chain in _chains(order):
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
        """Recompute the model now and then: with a clock not on a request's time."""
        if self._requests >= self._learn_at:
            seen = self._requests
            often = min(LEARN_REQUESTS_MAX, max(LEARN_REQUESTS, seen // LEARN_SHARE))
            self._learn_at = seen + min(often, max(LEARN_REQUESTS_MIN, seen // 2))
            self._model.refresh(self._now)
            self._looked_at = -1.0

    def _count_found(self, keys: Sequence[Key]) -> int:
        """Return how many of the keys a request that uses them found, and did not bring."""
        nodes, uses = map(self._tree.node_of.get, keys), self._tree.uses
        return sum(1 for node in nodes if node is not None and uses[node])

    # --- requests that run ---

    def _run(self, request: RequestId) -> _Running:
        """Return the record of a running request. One that never ends must not last for ever."""
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
        for node in sorted(running.nodes):
            if count_uses or tree.is_open(node):
                self._paths.use_node(node)
            tree.release(node)

    # --- victims ---

    def _look(self) -> None:
        """Compute the index of the oldest node of each cohort, if time has passed."""
        step = LOOK_UNITS if self._has_clock else LOOK_BLOCKS * 1024.0 / self.capacity
        if self._follows_lru != self._floor.follows_lru:
            self._follows_lru = self._floor.follows_lru
            self._looked_at = -1.0
        if 0.0 <= self._now - self._looked_at < step and self._looked_at >= 0.0:
            return
        tree = self._tree
        self._looked_at = self._now
        self._index = np.full(self._cohorts.count, np.inf)
        first = np.frombuffer(tree.first_of, dtype=np.int32)
        cohorts = np.flatnonzero(first != NO_NODE)
        if len(cohorts):
            used = np.frombuffer(tree.used)[first[cohorts]]
            self._index[cohorts] = (
                used if self._follows_lru else self._model.index_at(cohorts, self._now - used)
            )
            if first[self._cohorts.restored] != NO_NODE:
                self._index[self._cohorts.restored] = RESTORED_INDEX
        tree.changed.clear()

    def _most_dispensable(self) -> int:
        """Return the node with the lowest index, of those that are the oldest of a cohort.

        If LRU is followed the index is the last use: queues stand in that order.
        """
        tree, index = self._tree, self._index
        for cohort in tree.changed:
            node = tree.first_of[cohort]
            if node == NO_NODE:
                index[cohort] = np.inf
            elif cohort == self._cohorts.restored:
                index[cohort] = RESTORED_INDEX
            elif self._follows_lru:
                index[cohort] = tree.used[node]
            else:
                index[cohort] = self._model.index_of(cohort, self._now - tree.used[node])
        tree.changed.clear()
        return tree.first_of[int(index.argmin())]

    def _remember(self, node: int) -> None:
        """Leave a ghost of all blocks that ``node`` has lost from its tail."""
        tree = self._tree
        end, keys = tree.end[node], tree.keys[node]
        length = len(keys) - end
        share = min(1.0, length / tree.placed[node])
        self._ghosts.remember(keys[end], tree.cohort[node], share, length, tree.used[node])

    def _pop_anywhere(self, count: int, exclude: set[Key] | frozenset[Key]) -> list[Key]:
        """Return up to ``count`` keys that may go, out of order: room matters more than order."""
        tree, held = self._tree, self._held
        gone: list[Key] = []
        nodes = [(tree.busy[n] > 0, tree.used[n], -tree.depth(n), n) for n in tree.nodes()]
        for _, _, _, node in sorted(nodes):
            if len(gone) >= count:
                break
            gone += tree.cut(node, count - len(gone), held, exclude)
            tree.discard_empty(node)
            if len(gone) < count and tree.size[node]:  # go on behind one that must stay
                may_go = [
                    k for k in reversed(tree.keys_of(node)) if k not in held and k not in exclude
                ]
                del may_go[count - len(gone) :]
                tree.remove(may_go)
                gone += may_go
        return gone


def _chains(keys: Sequence[Key]) -> list[list[Key]]:
    """Return the chains in ``keys``, one for each KV-cache group, each key once."""
    if not keys:
        return []
    if _are_of_one_group(keys) and len(set(keys)) == len(keys):
        return [list(keys)]
    chains: dict[bytes, dict[Key, None]] = {}
    for key in keys:
        chains.setdefault(key[-GROUP_BYTES:], {})[key] = None
    return [list(chain) for chain in chains.values()]


def _are_of_one_group(keys: Sequence[Key]) -> bool:
    """Return whether all keys end in the same group; may be False if their lengths differ."""
    joined = b"".join(keys)
    length, count = len(keys[0]), len(keys)
    if len(joined) != length * count:
        return False
    # A column of the joined keys at a time: slicing each key takes five times as long.
    for place in range(max(0, length - GROUP_BYTES), length):
        if joined[place::length].count(joined[place]) != count:
            return False
    return True
