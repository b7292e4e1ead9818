"""Keeps the resident blocks of the ``reuse`` policy, as a prefix tree.

A *node* is a stretch of blocks, from head to tail, that were used alike: they
have one cohort and one last use. A node's parent holds the block before its
first, and is not evicted before it. Nodes of one cohort stand in a queue, in
the order of their last use.

A node that has children, or that a running request uses, need not be looked
at: when its turn comes it is put *aside*, out of its queue, and it goes back to
the front once its last child has gone and the last request has ended. It was
the oldest when it left, and all nodes that came since are younger.

The garbage collector has nothing to traverse: it tracks neither nodes nor a dict of them.
So nodes must not form cycles of references: they refer to their parents only, and a queue is
a dict by place, not a list of links.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtier.plugin_api.keys import Key

_Keys: TypeAlias = "list[Key] | tuple[Key, ...] | np.ndarray[Any, Any]"

ASIDE: Final = 0  #: the place of a node that stands in no queue
FRONT: Final = -1  #: the place of nodes that came back to the front of their queue

SHORT: Final = 32
"""Up to this many keys are kept in a tuple, more in an array, and those of an open node in a list.
The collector looks through each new tuple once, which takes milliseconds for hundreds of long
ones; it does not track NumPy's arrays."""


class Node(Struct, gc=False, eq=False):
    """A stretch of blocks. The policy reads the fields; they change here."""

    keys: _Keys  #: from head to tail
    cohort: int
    used: float  #: when last
    uses: int = 1  #: 0: it is open, its use is not known yet
    parent: Node | None = None
    children: int = 0  #: how many resident nodes have it as parent
    busy: int = 0  #: how many running requests use it
    placed: int = 0  #: how many keys it had when it was placed in its cohort
    lost: int = 0  #: how many were cut off its tail
    last: Key = b""  #: the first key of the child that was the last block of its request
    place: int = ASIDE  #: in the queue of its cohort

    def restore(self, cohort: int, used: float, uses: int) -> None:
        """Continue with what was known of the blocks when they were evicted."""
        self.cohort, self.used, self.uses = cohort, used, uses

    def end_with(self, last: Node) -> None:
        """Note which child is the last block of the node's request."""
        self.last = last.keys[0]


class Queue(Struct, gc=False, eq=False):
    """The nodes of a cohort, the one that was placed first in front."""

    at: dict[int, Node]  #: by place
    returned: list[Node]  #: those that came back, the latest goes first; some have left again
    first: int = 1  #: no node has a lower place
    newest: int = 0  #: place


class PrefixTree:
    """Finds the node of each key, and keeps nodes in their queues."""

    def __init__(self, queues: int) -> None:
        self.node_of: dict[Key, Node] = {}
        self.queues = [Queue({}, []) for _ in range(queues)]
        self.changed: set[int] = set()  #: queues that may have another first node

    def __del__(self) -> None:
        """Cut nodes off their parents: one freeing the next would overflow the stack.

        Python unwinds such chains only for objects that the garbage collector tracks.
        """
        for node in self.node_of.values():
            node.parent = None

    def add(self, keys: list[Key] | tuple[Key, ...], cohort: int, used: float) -> Node:
        """Return a new node that stands aside. It takes the keys from their current nodes."""
        node = Node(_stored(keys), cohort, used, placed=len(keys))
        self.node_of.update(dict.fromkeys(keys, node))
        return node

    def open(self, cohort: int, used: float) -> Node:
        """Return a new node of unknown use, which one running request uses."""
        return Node([], cohort, used, uses=0, busy=1)

    def extend(self, node: Node, keys: _Keys) -> None:
        """Let ``node`` take ``keys``, behind its own."""
        mine, new = node.keys, dict.fromkeys(_as_list(keys), node)
        if isinstance(mine, list):
            mine += new  # a request may bring a key twice
        elif len(mine) + len(keys) <= SHORT:
            node.keys = (*mine, *keys)
        else:
            node.keys = np.concatenate((_as_array(mine), _as_array(keys)))
        node.lost = 0
        self.node_of.update(new)

    def common(self, node: Node, chain: list[Key], at: int) -> int:
        """Return how many of the node's keys, from the first on, the chain has from ``at`` on.

        Comparing many keys at once takes a third of the time of looking each up.
        """
        keys = _as_list(node.keys)
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

    def run(self, chain: list[Key], at: int) -> tuple[Node | None, int]:
        """Return the node of the block at ``at``, and where the blocks from there on leave it.

        Blocks that are not resident count as a node of their own.
        """
        node_of = self.node_of
        node = node_of.get(chain[at])
        end = at + 1
        if node is not None:
            end = max(end, at + self.common(node, chain, at))
        while end < len(chain) and node_of.get(chain[end]) is node:
            end += 1
        return node, end

    def split(self, node: Node, keys: list[Key]) -> Node:
        """Move ``keys`` of ``node`` to a new node above it, and return the new node."""
        upper = self.split_off(node, keys)
        self.set_parent(upper, node.parent)
        self.set_parent(node, upper)
        return upper

    def split_off(self, node: Node, keys: list[Key]) -> Node:
        """Move ``keys`` of ``node`` to a new node without a parent, and return the new node."""
        rest = _as_list(node.keys)
        if rest[: len(keys)] == keys:
            rest = rest[len(keys) :]
        else:
            moved = set(keys)
            rest = [key for key in rest if key not in moved]
        new = self.add(keys, node.cohort, node.used)
        new.uses, new.placed = node.uses, node.placed
        self._keep(node, rest)
        return new

    def join(self, nodes: list[Node]) -> Node:
        """Return the first of the open ``nodes``, which now has the keys of all others."""
        first, *others = nodes
        for other in others:
            self.merge(first, other)
        return first

    def cut_last(self, node: Node) -> Node:
        """Move the last block of an open node to a node of its own; return it. Close both.

        It is the node itself if that has one block.
        """
        keys = _as_list(node.keys)
        last = None if len(keys) == 1 else self.add((keys.pop(),), node.cohort, node.used)
        node.keys = keys
        self.count_use(node)
        return last or node

    def merge(self, upper: Node, lower: Node) -> None:
        """Let ``upper`` take the keys of ``lower``, which has no children."""
        self.extend(upper, lower.keys)
        self._keep(lower, [])

    def set_parent(self, node: Node, parent: Node | None) -> None:
        """Hang ``node`` below ``parent``, which may be none."""
        old = node.parent
        if old is parent:
            return
        node.parent = parent
        if parent is not None:
            parent.children += 1
        if old is not None:
            old.children -= 1
            self.come_back(old)

    def release(self, node: Node) -> None:
        """Note that a running request no longer uses ``node``."""
        node.busy -= 1
        self.come_back(node)

    def place(self, node: Node, cohort: int, used: float) -> None:
        """Put ``node`` at the end of the queue of ``cohort``."""
        self.put_aside(node)
        node.cohort = cohort
        node.used = used
        node.placed = len(node.keys)
        queue = self.queues[cohort]
        if not queue.at:
            self.changed.add(cohort)
        node.place = queue.newest = queue.newest + 1
        queue.at[node.place] = node

    def put_aside(self, node: Node) -> None:
        """Take ``node`` out of its queue, if it stands in one."""
        place = node.place
        if place == ASIDE:
            return
        cohort = node.cohort
        queue = self.queues[cohort]
        if place == FRONT:
            self.changed.add(cohort)
        else:
            del queue.at[place]
            if place <= queue.first:
                self.changed.add(cohort)
        node.place = ASIDE

    def come_back(self, node: Node) -> None:
        """Put ``node`` at the front of its cohort's queue, if it stood aside and may go."""
        if node.place == ASIDE and not node.children and not node.busy and len(node.keys):
            node.place = FRONT
            self.queues[node.cohort].returned.append(node)
            self.changed.add(node.cohort)

    def first_of(self, cohort: int) -> Node | None:
        """Return the first node of a queue."""
        queue = self.queues[cohort]
        returned, at = queue.returned, queue.at
        while returned:
            if returned[-1].place == FRONT and returned[-1].cohort == cohort:
                return returned[-1]
            returned.pop()
        if not at:
            return None
        first = queue.first
        while first not in at:
            first += 1
        queue.first = first
        return at[first]

    def cut(
        self, node: Node, count: int, held: set[Key], exclude: set[Key] | frozenset[Key]
    ) -> list[Key]:
        """Remove and return up to ``count`` keys, from the tail up to one that must stay.

        The node may be empty then: the caller must call ``discard_empty``.
        """
        keys = node.keys
        start = max(0, len(keys) - count)
        gone = _as_list(keys[start:])
        gone.reverse()
        if not (held.isdisjoint(gone) and exclude.isdisjoint(gone)):
            stays = [key in held or key in exclude for key in gone]
            del gone[stays.index(True) :]
            start = len(keys) - len(gone)
        node_of = self.node_of
        for key in gone:
            del node_of[key]
        node.keys = keys[:start]
        node.lost += len(gone)
        return gone

    def remove(self, keys: Iterable[Key]) -> None:
        """Remove ``keys`` from their nodes."""
        node_of = self.node_of
        nodes = {node_of.pop(key, None) for key in keys}
        for node in nodes:
            if node is not None:
                self._keep(node, [key for key in _as_list(node.keys) if key in node_of])

    def _keep(self, node: Node, keys: list[Key]) -> None:
        """Leave ``keys`` to a node that has lost the others."""
        node.keys = keys if node.uses == 0 and keys else _stored(keys)
        node.lost = 0
        self.discard_empty(node)

    def discard_empty(self, node: Node) -> None:
        """Release ``node`` if nothing is in it."""
        if not len(node.keys):
            self.put_aside(node)
            self.set_parent(node, None)

    def count_use(self, node: Node) -> None:
        """Count a use of ``node``. For an open node it is the first, and closes the node."""
        if not node.uses:
            node.keys = _stored(_as_list(node.keys))
        node.uses += 1

    def begin_time(self, now: float) -> None:
        """Set the last use of all nodes to now: their times are of another clock."""
        for node in self.nodes():
            node.used = now

    def nodes(self) -> list[Node]:
        """Return all nodes that hold keys."""
        return list(dict.fromkeys(self.node_of.values()))


def keys_of(node: Node) -> tuple[Key, ...]:
    """Return the keys that are in ``node``, from head to tail."""
    return tuple(_as_list(node.keys))


def depth(node: Node) -> int:
    """Return how many ancestors a node has."""
    count, above = 0, node.parent
    while above is not None:
        count, above = count + 1, above.parent
    return count


def _stored(keys: list[Key] | tuple[Key, ...]) -> _Keys:
    """Return a copy of the keys in the storage form of a node that is not open."""
    return tuple(keys) if len(keys) <= SHORT else np.array(keys, dtype=object)


def _as_array(keys: _Keys) -> np.ndarray[Any, Any]:
    return np.asarray(keys, dtype=object)


def _as_list(keys: _Keys) -> list[Key]:
    """Return a node's keys, or some of them, as a list: the same one if they are in a list."""
    if isinstance(keys, tuple):
        return list(keys)
    if isinstance(keys, list):
        return keys
    listed: list[Key] = keys.tolist()
    return listed
