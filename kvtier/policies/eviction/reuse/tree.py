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
    from collections.abc import Collection, Iterable, Sequence

    from kvtier.plugin_api.keys import Key

_Keys: TypeAlias = "Sequence[Key] | np.ndarray[Any, Any]"

NO_NODE: Final = -1
ASIDE: Final = -1  #: the queue of nodes that stand in none
FREE: Final = -2  #: the queue of numbers that belong to no node

SHORT: Final = 32
"""So many keys stand in a tuple. The collector looks through each new tuple once, which
takes milliseconds for hundreds of long ones; it does not track NumPy's arrays."""


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

    def add(self, keys: tuple[Key, ...], cohort: int, used: float) -> int:
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
        """Return a new node of unknown use, which one running request uses. See ``bring``."""
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

    def bring(self, node: int, keys: Sequence[Key]) -> None:
        """Let an open node take ``keys``, which are in no node yet."""
        mine = self.keys[node]
        if self.size[node] < len(mine):  # keys that have left could come again
            mine = self.keys[node] = list(self.keys_of(node))
        assert isinstance(mine, list)
        mine += keys
        self.end[node] = len(mine)
        self.size[node] += len(keys)
        self._note(keys, node)

    def extend(self, node: int, keys: Collection[Key]) -> None:
        """Let ``node`` take ``keys``, behind its own."""
        mine = self.keys_of(node)
        self.keys[node] = _stored((*mine, *keys))
        self.size[node] = self.end[node] = len(mine) + len(keys)
        self._note(keys, node)

    def keys_of(self, node: int) -> tuple[Key, ...]:
        """Return the keys that are in ``node``, from head to tail."""
        keys = _as_tuple(self.keys[node])
        if self.size[node] == len(keys):
            return keys
        node_of = self.node_of
        return tuple([key for key in keys[: self.end[node]] if node_of.get(key) == node])

    def run(self, chain: tuple[Key, ...], at: int) -> tuple[int, int]:
        """Return the node of the block at ``at``, and where the blocks from there on leave it.

        Blocks that are not resident count as a node of their own.
        """
        node_of = self.node_of
        node = node_of.get(chain[at], NO_NODE)
        if node != NO_NODE:
            size = self.size[node]
            keys = self.keys[node]
            if size == len(keys) and chain[at : at + size] == _as_tuple(keys):
                return node, at + size
        end = at + 1
        while end < len(chain) and node_of.get(chain[end], NO_NODE) == node:
            end += 1
        return node, end

    def split(self, node: int, keys: tuple[Key, ...]) -> int:
        """Move ``keys`` of ``node`` to a new node above it, and return the new node."""
        upper = self.split_off(node, keys)
        self.set_parent(upper, self.parent[node])
        self.set_parent(node, upper)
        return upper

    def split_off(self, node: int, keys: tuple[Key, ...]) -> int:
        """Move ``keys`` of ``node`` to a new node without a parent, and return the new node."""
        moved = set(keys)
        rest = tuple([key for key in self.keys_of(node) if key not in moved])
        new = self.add(keys, self.cohort[node], self.used[node])
        self.uses[new] = self.uses[node]
        self.placed[new] = self.placed[node]
        self.keys[node] = list(rest) if self.uses[node] == 0 else _stored(rest)
        self.size[node] = self.end[node] = len(rest)
        self.discard_empty(node)
        return new

    def join(self, nodes: list[int]) -> int:
        """Return the first of the open ``nodes``, which now has the keys of all others."""
        first, *others = nodes
        self.keys[first] = _stored(self.keys_of(first))
        self.size[first] = self.end[first] = len(self.keys[first])
        for other in others:
            keys = self.keys_of(other)
            self.extend(first, keys)
            self.lose(other, len(keys))
        return first

    def cut_last(self, node: int) -> int:
        """Move the last block of an open node to a node of its own; return it. Close both.

        It is the node itself if that has one block.
        """
        self.uses[node] = 1
        keys = self.keys_of(node)
        if len(keys) == 1:
            return node
        self.keys[node] = _stored(keys[:-1])
        self.size[node] = self.end[node] = len(keys) - 1
        return self.add(keys[-1:], self.cohort[node], self.used[node])

    def merge(self, upper: int, lower: int) -> None:
        """Let ``upper`` take the keys of ``lower``, its only child, which has none."""
        keys = self.keys_of(lower)
        self.extend(upper, keys)
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
        gone = list(_as_tuple(keys[start:end]))
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


def _stored(keys: tuple[Key, ...]) -> _Keys:
    """Return the keys in a node's storage form."""
    if len(keys) <= SHORT:
        return keys
    return np.array(keys, dtype=object)


def _as_tuple(keys: _Keys) -> tuple[Key, ...]:
    """Return a node's keys, or some of them, as a tuple."""
    return tuple(keys.tolist() if isinstance(keys, np.ndarray) else keys)
