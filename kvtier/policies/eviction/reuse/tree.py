"""Keeps the resident blocks of the ``reuse`` policy, as a prefix tree.

A *node* is a stretch of blocks, from head to tail, that were used alike: they
have one cohort and one last use. A node's parent holds the block before its
first, and is not evicted before it. Nodes of one cohort stand in a queue, in
the order of their last use.

A node that has children, or that a running request uses, need not be looked
at: when its turn comes it is put *aside*, out of its queue, and it goes back to
the front once its last child has gone and the last request has ended. It was
the oldest when it left, and all nodes that came since are younger.

All data about nodes is in arrays, keys too, and the dict of keys holds plain
numbers: the garbage collector has nothing to look through.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtier.plugin_api.keys import Key

_Keys: TypeAlias = "Sequence[Key] | np.ndarray[Any, Any]"

NO_NODE: Final = -1
ASIDE: Final = -1  #: the queue of nodes that stand in none
FREE: Final = -2  #: the queue of numbers that belong to no node

SHORT: Final = 32
"""So many keys stand in a tuple, more in an array, those of a node that is being filled in a
list. The collector looks through each new tuple once, which takes milliseconds for hundreds of
long ones; it does not track NumPy's arrays."""


class PrefixTree:
    """Nodes by number. Fields are read by the policy, and changed here."""

    def __init__(self, queues: int) -> None:
        self.node_of: dict[Key, int] = {}
        self.keys: list[_Keys] = []  #: from head to tail; some may have left
        self.end = array("i")  #: of those, how many may still be here
        self.size = array("i")  #: how many are
        self.parent = array("i")
        self.children = array("i")  #: how many resident nodes have it as parent
        self.busy = array("i")  #: how many running requests use it
        self.cohort = array("h")
        self.placed = array("i")  #: size when it was placed in its cohort
        self.used = array("d")  #: when last
        self.uses = array("i")
        self.last = array("i")  #: the child that was the last block of its request
        self.first_of = array("i", [NO_NODE]) * queues
        self.changed: set[int] = set()  #: queues that may have another first node
        self._last_of = array("i", [NO_NODE]) * queues
        self._queue = array("h")
        self._next = array("i")
        self._previous = array("i")
        self._free: list[int] = []
        self._numbers = (
            *(self.end, self.size, self.placed, self.uses, self.cohort, self.children),
            *(self.busy, self.parent, self.last, self._queue, self._next, self._previous),
        )

    def add(self, keys: Sequence[Key], cohort: int, used: float) -> int:
        """Return a new node that stands aside. It takes the keys from their current nodes."""
        if self._free:
            node = self._free.pop()
            self.keys[node] = _stored(keys)
            self.used[node] = used
        else:
            node = len(self.keys)
            self.keys.append(_stored(keys))
            self.used.append(used)
            for numbers in self._numbers:
                numbers.append(0)
        self.end[node] = self.size[node] = self.placed[node] = len(keys)
        self.cohort[node] = cohort
        self.uses[node] = 1
        self.parent[node] = self.last[node] = NO_NODE
        self._queue[node] = ASIDE
        self._note(keys, node)
        return node

    def open(self, cohort: int, used: float) -> int:
        """Return a new node of unknown use, which one running request uses."""
        node = self.add((), cohort, used)
        self.keys[node] = []
        self.uses[node] = 0
        self.busy[node] = 1
        return node

    def _note(self, keys: Iterable[Key], node: int) -> None:
        node_of = self.node_of
        for key in keys:
            node_of[key] = node

    def is_open(self, node: int) -> bool:
        """Return whether the node's use is not known yet."""
        return self.uses[node] == 0 and self.size[node] > 0

    def extend(self, node: int, keys: _Keys) -> None:
        """Let ``node`` take ``keys``, behind its own."""
        mine = self._present(node)
        if isinstance(mine, list):
            mine += keys
        elif len(mine) + len(keys) <= SHORT:
            mine = (*mine, *keys)
        else:
            mine = np.concatenate((_as_array(mine), _as_array(keys)))
        self.keys[node] = mine
        self.size[node] = self.end[node] = len(mine)
        self._note(_as_list(keys), node)

    def keys_of(self, node: int) -> tuple[Key, ...]:
        """Return the keys that are in ``node``, from head to tail."""
        return tuple(_as_list(self._present(node)))

    def _present(self, node: int) -> _Keys:
        """Return the keys that are in ``node``, as they are kept: perhaps its own list of them."""
        keys, end = self.keys[node], self.end[node]
        if end < len(keys):
            keys = keys[:end]
        if self.size[node] == end:
            return keys
        node_of = self.node_of
        here = [key for key in _as_list(keys) if node_of.get(key) == node]
        return here if isinstance(keys, list) else _stored(here)

    def run(self, chain: list[Key], at: int) -> tuple[int, int]:
        """Return the node of the block at ``at``, and where the blocks from there on leave it.

        Blocks that are not resident count as a node of their own.
        """
        node_of = self.node_of
        node = node_of.get(chain[at], NO_NODE)
        end = at + 1
        if node != NO_NODE and self.size[node] == self.end[node]:
            # Comparing many keys at once takes a third of the time of looking each up.
            end = max(end, at + _common(chain, at, _as_list(self._present(node))))
        while end < len(chain) and node_of.get(chain[end], NO_NODE) == node:
            end += 1
        return node, end

    def split(self, node: int, keys: list[Key]) -> int:
        """Move ``keys`` of ``node`` to a new node above it, and return the new node."""
        upper = self.split_off(node, keys)
        self.set_parent(upper, self.parent[node])
        self.set_parent(node, upper)
        return upper

    def split_off(self, node: int, keys: list[Key]) -> int:
        """Move ``keys`` of ``node`` to a new node without a parent, and return the new node."""
        mine = self._present(node)
        if _as_list(mine[: len(keys)]) == keys:
            rest = mine[len(keys) :]
        else:
            moved = set(keys)
            rest = [key for key in _as_list(mine) if key not in moved]
        new = self.add(keys, self.cohort[node], self.used[node])
        self.uses[new] = self.uses[node]
        self.placed[new] = self.placed[node]
        self.keys[node] = _as_list(rest) if self.uses[node] == 0 else _stored(rest)
        self.size[node] = self.end[node] = len(rest)
        self.discard_empty(node)
        return new

    def join(self, nodes: list[int]) -> int:
        """Return the first of the open ``nodes``, which now has the keys of all others."""
        first, *others = nodes
        for other in others:
            keys = self._present(other)
            self.extend(first, keys)
            self.lose(other, len(keys))
        return first

    def cut_last(self, node: int) -> int:
        """Move the last block of an open node to a node of its own; return it. Close both.

        It is the node itself if that has one block.
        """
        keys = _as_list(self._present(node))
        last = [] if len(keys) == 1 else [keys.pop()]
        self.keys[node] = keys
        self.size[node] = self.end[node] = len(keys)
        self.count_use(node)
        return self.add(last, self.cohort[node], self.used[node]) if last else node

    def merge(self, upper: int, lower: int) -> None:
        """Let ``upper`` take the keys of ``lower``, its only child, which has none."""
        self.extend(upper, self._present(lower))
        self.size[lower] = 0
        self.discard_empty(lower)

    def set_parent(self, node: int, parent: int) -> None:
        """Hang ``node`` below ``parent``, which may be none."""
        old = self.parent[node]
        if old == parent:
            return
        self.parent[node] = parent
        if parent != NO_NODE:
            self.children[parent] += 1
        if old != NO_NODE:
            self.children[old] -= 1
            self._settle(old)

    def use(self, node: int) -> None:
        """Note that one more running request uses ``node``."""
        self.busy[node] += 1

    def release(self, node: int) -> None:
        """Note that one running request fewer uses ``node``."""
        self.busy[node] -= 1
        self._settle(node)

    def place(self, node: int, cohort: int, used: float) -> None:
        """Put ``node`` at the end of the queue of ``cohort``."""
        self._leave_queue(node)
        self.cohort[node] = cohort
        self.used[node] = used
        self.placed[node] = self.size[node]
        last = self._last_of[cohort]
        self._queue[node] = cohort
        self._previous[node] = last
        self._next[node] = NO_NODE
        self._last_of[cohort] = node
        if last == NO_NODE:
            self.first_of[cohort] = node
            self.changed.add(cohort)
        else:
            self._next[last] = node

    def put_aside(self, node: int) -> None:
        """Take ``node`` out of its queue."""
        self._leave_queue(node)

    def come_back(self, node: int) -> None:
        """Put ``node`` at the front of its cohort's queue, if it stood aside and may go."""
        if self.children[node] or self.busy[node] or self._queue[node] != ASIDE:
            return
        cohort = self.cohort[node]
        first = self.first_of[cohort]
        self._queue[node] = cohort
        self._previous[node] = NO_NODE
        self._next[node] = first
        self.first_of[cohort] = node
        self.changed.add(cohort)
        if first == NO_NODE:
            self._last_of[cohort] = node
        else:
            self._previous[first] = node

    def cut(
        self, node: int, count: int, held: set[Key], exclude: set[Key] | frozenset[Key]
    ) -> list[Key]:
        """Remove and return up to ``count`` keys, from the tail on to one that must stay.

        The node may be empty then: the caller must call ``discard_empty``.
        """
        node_of = self.node_of
        keys = self.keys[node]
        end = self.end[node]
        start = max(0, end - count)
        gone = _as_list(keys[start:end])
        whole = self.size[node] == end  # nothing has left from the middle
        if whole and held.isdisjoint(gone) and exclude.isdisjoint(gone):
            gone.reverse()
            for _ in map(node_of.__delitem__, gone):
                pass
            self.end[node] = start
            self.size[node] -= len(gone)
            return gone
        gone = []
        while end and len(gone) < count:
            key = keys[end - 1]
            if node_of.get(key) == node:
                if key in held or key in exclude:
                    break
                gone.append(key)
                del node_of[key]
            end -= 1
        self.end[node] = end
        self.size[node] -= len(gone)
        return gone

    def remove(self, keys: Iterable[Key]) -> None:
        """Remove ``keys`` from whatever nodes they are in."""
        node_of = self.node_of
        for key in keys:
            node = node_of.pop(key, None)
            if node is not None:
                self.size[node] -= 1
                self.discard_empty(node)

    def lose(self, node: int, count: int) -> None:
        """Note that other nodes took ``count`` keys of ``node``."""
        self.size[node] -= count
        self.discard_empty(node)

    def discard_empty(self, node: int) -> None:
        """Release ``node`` if nothing is in it."""
        if not self.size[node]:
            self._leave_queue(node)
            self.set_parent(node, NO_NODE)
            self.keys[node] = ()
            self._settle(node)

    def _settle(self, node: int) -> None:
        """Requeue the node if it may go again. A number is free once nothing points to its node."""
        if self.size[node]:
            self.come_back(node)
        elif not (self.children[node] or self.busy[node]) and self._queue[node] != FREE:
            self._queue[node] = FREE
            self._free.append(node)

    def count_use(self, node: int) -> None:
        """Count a use of ``node``. For an open node it is the first, and closes the node."""
        if not self.uses[node]:
            self.keys[node] = _stored(self._present(node))
            self.end[node] = len(self.keys[node])
        self.uses[node] += 1

    def restore(self, node: int, cohort: int, used: float, uses: int) -> None:
        """Give an open node the past of blocks that were evicted and have come back."""
        self.cohort[node] = cohort
        self.used[node] = used
        self.uses[node] = uses

    def set_last(self, node: int, child: int) -> None:
        """Note which child of ``node`` was the last block of its request."""
        self.last[node] = child

    def set_used(self, used: float) -> None:
        """Set the last use of all nodes to the same time."""
        self.used = array("d", [used]) * len(self.used)

    def depth(self, node: int) -> int:
        """Return how many ancestors a node has."""
        depth = 0
        while (node := self.parent[node]) != NO_NODE:
            depth += 1
        return depth

    def nodes(self) -> list[int]:
        """Return all nodes that hold keys."""
        return [node for node, size in enumerate(self.size) if size]

    def _leave_queue(self, node: int) -> None:
        queue = self._queue[node]
        if queue < 0:
            return
        self._queue[node] = ASIDE
        before, after = self._previous[node], self._next[node]
        if before == NO_NODE:
            self.first_of[queue] = after
            self.changed.add(queue)
        else:
            self._next[before] = after
        if after == NO_NODE:
            self._last_of[queue] = before
        else:
            self._previous[after] = before


def _stored(keys: _Keys) -> _Keys:
    """Return a copy of the keys in the storage form of a node that is not open."""
    return tuple(keys) if len(keys) <= SHORT else np.array(keys, dtype=object)


def _as_array(keys: _Keys) -> np.ndarray[Any, Any]:
    return np.asarray(keys, dtype=object)


def _as_list(keys: _Keys) -> list[Key]:
    """Return a node's keys, or some of them, as a list: the same one if they are in a list."""
    if isinstance(keys, np.ndarray):
        listed: list[Key] = keys.tolist()
        return listed
    return keys if isinstance(keys, list) else list(keys)


def _common(chain: list[Key], at: int, keys: list[Key]) -> int:
    """Return how many of ``keys`` the chain has from ``at`` on, without a gap."""
    if chain[at : at + len(keys)] == keys:
        return len(keys)
    low, high = 0, len(keys) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if chain[at + low : at + middle] == keys[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
