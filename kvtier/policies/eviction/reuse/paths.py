"""Finds a request's path through the prefix tree, and places its blocks in cohorts.

A request uses a chain of blocks, from head to tail. Walking it gives its *path*:
nodes that were resident, cut where the chain leaves them; stretches that were
evicted and came back, as their ghosts show; and below them the new blocks. Each
part is then placed in its cohort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.policies.eviction.reuse.cohorts import use_level
from kvtier.policies.eviction.reuse.tree import NO_NODE

if TYPE_CHECKING:
    from kvtier.plugin_api.keys import Key
    from kvtier.policies.eviction.reuse.ghosts import Ghosts
    from kvtier.policies.eviction.reuse.model import ReuseModel
    from kvtier.policies.eviction.reuse.tree import PrefixTree


class _Use:
    """Facts about a request's chain, as it is walked from head to tail."""

    __slots__ = ("absent", "blocks", "branches", "fresh", "gap", "nodes", "turn")

    def __init__(self) -> None:
        self.nodes: list[int] = []  #: its path through the known blocks
        self.fresh: list[int] = []  #: nodes of the new blocks below its path
        self.absent = False  #: some of its blocks are not resident
        self.blocks = 0  #: how many blocks were known, from the head on
        self.turn = 0  #: of the conversation that it continues; 0: of none
        self.gap = 0.0  #: since the deepest known block was used
        self.branches = False  #: leaves an earlier request in the middle


class Paths:
    """Places the blocks of requests in cohorts, and counts the returning ones."""

    def __init__(self, tree: PrefixTree, model: ReuseModel, ghosts: Ghosts) -> None:
        self._now = 0.0
        self._tree = tree
        self._model = model
        self._cohorts = model.cohorts
        self._ghosts = ghosts

    def set_now(self, now: float) -> None:
        """Set the time at which the following calls happen."""
        self._now = now

    def use(self, chain: list[Key]) -> tuple[int, bool]:
        """Place the blocks of a request that ends.

        Return the cohort of the new ones, and whether some are not resident.
        """
        use = self._walk(chain)
        return self._place_chain(use, len(chain)), use.absent

    def use_node(self, node: int) -> None:
        """Count a use of a node by a request whose order is unknown."""
        tree = self._tree
        if tree.is_open(node):
            tree.count_use(node)
            self.place(node, self._cohorts.unordered)
        elif tree.size[node]:
            gap = max(0.0, self._now - tree.used[node])
            self._model.come_back(tree.cohort[node], gap, tree.size[node] / tree.placed[node])
            tree.count_use(node)
            shared = self._is_shared(node)
            self.place(node, self._cohorts.used_again(tree.uses[node], gap, 0, shared=shared))

    def place(self, node: int, cohort: int) -> None:
        """Put a node that was used now in a cohort."""
        self._tree.place(node, cohort, self._now)
        self._model.enter(cohort)

    def complete(self, chain: list[Key], cohort: int) -> None:
        """Place blocks that were stored after their request had ended."""
        tree = self._tree
        parent, end = NO_NODE, 0
        while end < len(chain):
            at = end
            node, end = tree.run(chain, at)
            if node == NO_NODE:
                continue
            whole = end - at == tree.size[node]
            if tree.is_open(node):
                node = node if whole else tree.split_off(node, chain[at:end])
                tree.set_parent(node, parent)
                tree.count_use(node)
                self.place(node, cohort)
            else:
                node = node if whole else tree.split(node, chain[at:end])
                tree.set_parent(node, parent)
                if not whole:
                    self.place(node, tree.cohort[node])
            parent = node

    def _place_chain(self, use: _Use, length: int) -> int:
        """Put the blocks of a request in their cohorts; return the one of the new blocks."""
        cohorts, tree = self._cohorts, self._tree
        new = length - use.blocks
        if use.branches:
            cohort = cohorts.branch(use.gap, new)
            use.turn = 0
        elif use.turn:
            cohort = cohorts.turn(use.turn + 1, use.gap, new)
        else:
            cohort = cohorts.first(length)
        self._place_path(use, new)
        if use.fresh:
            above = use.nodes[-1] if use.nodes else NO_NODE
            body = tree.join(use.fresh)
            last = tree.cut_last(body)
            if last != body:
                tree.set_parent(body, above)
                self.place(body, cohort)
                tree.set_last(body, last)
                above = body
            elif above != NO_NODE and not self._is_shared(above):
                tree.set_last(above, last)
            tree.set_parent(last, above)
            self.place(last, cohorts.last(use.turn + 1))
        return cohort

    def _walk(self, chain: list[Key]) -> _Use:
        """Find the nodes of a chain, count returns, and split off the blocks it did not use."""
        tree, use = self._tree, _Use()
        end = 0
        while end < len(chain):
            at = end
            node, end = tree.run(chain, at)
            if node == NO_NODE or tree.is_open(node):
                self._meet_ghosts(chain, at, end, node, use)
                continue
            if use.fresh:  # stored again, above what was still there
                use.nodes.append(tree.join(use.fresh))
                use.fresh = []
            share = (end - at) / tree.placed[node]
            self._count_return(tree.cohort[node], tree.used[node], share, use)
            use.branches = end - at < tree.size[node]
            use.nodes.append(tree.split(node, chain[at:end]) if use.branches else node)
            use.blocks = end
        return use

    def _meet_ghosts(self, chain: list[Key], at: int, end: int, node: int, use: _Use) -> None:
        """Go through blocks that were not here when the request began: once evicted, or new."""
        tree = self._tree
        use.absent = use.absent or node == NO_NODE
        while at < end:
            ghost = self._ghosts.pop(chain[at], self._now)
            if ghost is None:
                break
            self._count_return(ghost.cohort, ghost.used, ghost.share, use)
            keys = chain[at : at + max(1, min(ghost.length, end - at))]
            use.branches = False
            at += len(keys)
            use.blocks = at
            if node != NO_NODE:
                back = tree.split_off(node, keys)
                uses = self._cohorts.uses_of[ghost.cohort]
                tree.restore(back, ghost.cohort, ghost.used, uses)
                use.nodes.append(back)
        if node != NO_NODE and at < end:
            whole = end - at == tree.size[node]
            use.fresh.append(node if whole else tree.split_off(node, chain[at:end]))

    def _count_return(self, cohort: int, used: float, share: float, use: _Use) -> None:
        use.gap = max(0.0, self._now - used)
        use.turn = self._cohorts.turn_of[cohort] or use.turn
        self._model.come_back(cohort, use.gap, share)

    def _place_path(self, use: _Use, new: int) -> None:
        """Put the blocks used again, with ``new`` blocks below them, in their cohorts."""
        tree, cohorts, nodes = self._tree, self._cohorts, use.nodes
        parent = NO_NODE
        for node in nodes:
            tree.set_parent(node, parent)
            parent = node
        on_path = set(nodes)
        shared = 0  # so many nodes of the path, from the head on, have other branches
        for depth, node in enumerate(nodes, start=1):
            goes_on = depth < len(nodes)
            others = tree.children[node] - goes_on
            if others and (goes_on or use.fresh):
                others -= self._supersede(node, on_path)
            if others or self._is_shared(node):
                shared = depth
            tree.count_use(node)
        for depth, node in enumerate(self._merge(nodes, shared), start=1):
            gap = max(0.0, self._now - tree.used[node])
            cohort = cohorts.used_again(tree.uses[node], gap, new, shared=depth <= shared)
            self.place(node, cohort)

    def _merge(self, nodes: list[int], shared: int) -> list[int]:
        """Merge like nodes below the ``shared`` ones of a path; return the remaining path.

        So a conversation has as many nodes as there are levels of uses, not one for each turn.
        """
        tree = self._tree
        left = nodes[: shared + 1]
        for at in range(shared + 1, len(nodes)):
            upper, lower = left[-1], nodes[at]
            below = nodes[at + 1] if at + 1 < len(nodes) else NO_NODE
            alike = use_level(tree.uses[upper]) == use_level(tree.uses[lower])
            if alike and tree.children[lower] == (below != NO_NODE):
                if below != NO_NODE:
                    tree.set_parent(below, upper)
                tree.merge(upper, lower)
            else:
                left.append(lower)
        nodes[:] = left
        return left

    def _supersede(self, node: int, on_path: set[int]) -> int:
        """Return 1 if an earlier request's last block, which this one left out, hung here."""
        tree, cohorts = self._tree, self._cohorts
        last = tree.last[node]
        if last == NO_NODE or last in on_path or tree.parent[last] != node:
            return 0
        if not cohorts.is_last(tree.cohort[last]):
            return 0
        tree.set_parent(last, NO_NODE)
        self.place(last, cohorts.superseded)
        return 1

    def _is_shared(self, node: int) -> bool:
        return self._tree.cohort[node] >= self._cohorts.first_shared
