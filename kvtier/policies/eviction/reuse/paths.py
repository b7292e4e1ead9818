"""Finds a request's path through the prefix tree, and places its blocks in cohorts.

A request uses a chain of blocks, from head to tail. Walking it gives its *path*:
nodes that were resident, cut where the chain leaves them; stretches that were
evicted and came back, as their ghosts show; and below them the new blocks. Each
part is then placed in its cohort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.policies.eviction.reuse.cohorts import use_level

if TYPE_CHECKING:
    from kvtier.plugin_api.keys import Key
    from kvtier.policies.eviction.reuse.ghosts import Ghosts
    from kvtier.policies.eviction.reuse.model import ReuseModel
    from kvtier.policies.eviction.reuse.tree import Node, PrefixTree


class _Use:
    """Facts about a request's chain, as it is walked from head to tail."""

    __slots__ = ("absent", "blocks", "branches", "fresh", "gap", "nodes", "on_path", "turn")

    def __init__(self) -> None:
        self.nodes: list[Node] = []  #: its path through the known blocks
        self.on_path: set[Node] = set()  #: the same, as a path may have thousands
        self.fresh: list[Node] = []  #: nodes of the new blocks below its path
        self.absent = False  #: some of its blocks are not resident
        self.blocks = 0  #: how many blocks were known, from the head on
        self.turn = 0  #: of the conversation that it continues; 0: of none
        self.gap = 0.0  #: since the deepest known block was used
        self.branches = False  #: leaves an earlier request in the middle

    def go_on(self, node: Node) -> None:
        """Add the next node of the path."""
        self.nodes.append(node)
        self.on_path.add(node)


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

        Return the cohort of the new ones, and whether some are not resident. A key that is in the
        chain twice counts at its first place.
        """
        use = self._walk(chain)
        return self._place_chain(use, len(chain)), use.absent

    def use_node(self, node: Node) -> None:
        """Count a use of a node by a request whose order is unknown."""
        if not len(node.keys):
            return
        is_new = not node.uses
        gap = max(0.0, self._now - node.used)
        if not is_new:
            self._model.come_back(node.cohort, gap, len(node.keys) / node.placed)
        self._tree.count_use(node)
        cohort = self._cohorts.unordered
        if not is_new:
            shared = node.cohort >= self._cohorts.first_shared
            cohort = self._cohorts.used_again(node.uses, gap, 0, shared=shared)
        self.place(node, cohort)

    def place(self, node: Node, cohort: int) -> None:
        """Put a node that was used now in a cohort."""
        self._tree.place(node, cohort, self._now)
        self._model.enter(cohort)

    def complete(self, chain: list[Key], cohort: int) -> None:
        """Place blocks that were stored after their request had ended."""
        tree = self._tree
        chain = list(dict.fromkeys(chain))
        parent, end = None, 0
        while end < len(chain):
            at = end
            node, end = tree.run(chain, at)
            if node is None:
                continue
            whole = end - at == len(node.keys)
            if not node.uses:
                node = node if whole else tree.split_off(node, chain[at:end])
                tree.set_parent(node, parent)
                tree.count_use(node)
                self.place(node, cohort)
            else:
                node = node if whole else tree.split(node, chain[at:end])
                tree.set_parent(node, parent)
                if not whole:
                    self.place(node, node.cohort)
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
        if use.nodes:
            self._place_path(use, new)
        if use.fresh:
            above = use.nodes[-1] if use.nodes else None
            body = tree.join(use.fresh)
            last = tree.cut_last(body)
            if last is not body:
                tree.set_parent(body, above)
                self.place(body, cohort)
                above = body
            if above is not None and (above is body or above.cohort < cohorts.first_shared):
                above.end_with(last)
            tree.set_parent(last, above)
            self.place(last, cohorts.last(use.turn + 1))
        return cohort

    def _walk(self, chain: list[Key]) -> _Use:
        """Find the nodes of a chain, count returns, and split off the blocks it did not use."""
        tree, use = self._tree, _Use()
        node_of = tree.node_of
        length, end = len(chain), 0
        while end < length:
            at = end
            node = node_of.get(chain[at])
            if node is None or not node.uses:
                node, end = tree.run(chain, at)
                if node not in use.fresh:
                    self._meet_ghosts(chain, at, end, node, use)
                continue
            size = len(node.keys)
            end = at + tree.common(node, chain, at)
            if node in use.on_path:  # for the second time in the chain
                end = max(end, at + 1)
                continue
            if end == at:  # in the middle of the node
                end = at + 1
            if use.fresh:  # stored again, above what was still there
                use.go_on(tree.join(use.fresh))
                use.fresh = []
            self._count_return(node.cohort, node.used, (end - at) / node.placed, use)
            use.branches = end - at < size
            use.go_on(tree.split(node, chain[at:end]) if use.branches else node)
            use.blocks = end
        return use

    def _meet_ghosts(
        self, chain: list[Key], at: int, end: int, node: Node | None, use: _Use
    ) -> None:
        """Walk blocks that were not resident when the request began: once evicted, or new."""
        tree = self._tree
        use.absent = use.absent or node is None
        while at < end:
            ghost = self._ghosts.pop(chain[at], self._now)
            if ghost is None:
                break
            self._count_return(ghost.cohort, ghost.used, ghost.share, use)
            keys = chain[at : at + max(1, min(ghost.length, end - at))]
            use.branches = False
            at += len(keys)
            use.blocks = at
            if node is not None:
                back = tree.split_off(node, keys)
                back.restore(ghost.cohort, ghost.used, self._cohorts.uses_of[ghost.cohort])
                use.go_on(back)
        if node is not None and at < end:
            whole = end - at == len(node.keys)
            use.fresh.append(node if whole else tree.split_off(node, chain[at:end]))

    def _count_return(self, cohort: int, used: float, share: float, use: _Use) -> None:
        use.gap = gap = max(0.0, self._now - used)
        use.turn = self._cohorts.turn_of[cohort] or use.turn
        self._model.come_back(cohort, gap, share)

    def _place_path(self, use: _Use, new: int) -> None:
        """Put the blocks used again, with ``new`` blocks below them, in their cohorts."""
        tree, cohorts, nodes = self._tree, self._cohorts, use.nodes
        parent = None
        for node in nodes:
            if node.parent is not parent:
                tree.set_parent(node, parent)
            parent = node
        shared = 0  # so many nodes of the path, from the head on, have other branches
        first_shared = cohorts.first_shared
        for depth, node in enumerate(nodes, start=1):
            goes_on = depth < len(nodes)
            others = node.children - goes_on
            if others and (goes_on or use.fresh):
                others -= self._supersede(node, use.on_path)
            if others or node.cohort >= first_shared:
                shared = depth
            tree.count_use(node)
        for depth, node in enumerate(self._merge(nodes, shared), start=1):
            gap = max(0.0, self._now - node.used)
            cohort = cohorts.used_again(node.uses, gap, new, shared=depth <= shared)
            self.place(node, cohort)

    def _merge(self, nodes: list[Node], shared: int) -> list[Node]:
        """Merge like nodes below the ``shared`` ones of a path; return the remaining path.

        So a conversation has as many nodes as there are levels of uses, not one for each turn.
        """
        tree = self._tree
        left = nodes[: shared + 1]
        for at in range(shared + 1, len(nodes)):
            upper, lower = left[-1], nodes[at]
            below = nodes[at + 1] if at + 1 < len(nodes) else None
            alike = use_level(upper.uses) == use_level(lower.uses)
            if alike and lower.children == (below is not None):
                if below is not None:
                    tree.set_parent(below, upper)
                tree.merge(upper, lower)
            else:
                left.append(lower)
        nodes[:] = left
        return left

    def _supersede(self, node: Node, path: set[Node]) -> int:
        """Detach an earlier request's last block, if left out here. Return how many: 0 or 1."""
        tree, cohorts = self._tree, self._cohorts
        last = tree.node_of.get(node.last)
        if last is None or last.parent is not node or last in path:
            return 0
        if not cohorts.is_last(last.cohort):
            return 0
        tree.set_parent(last, None)
        self.place(last, cohorts.superseded)
        return 1
