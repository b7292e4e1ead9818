"""What two routers make of an engine's KV events: the rules by which each folds them to an index.

Each is written from what the router's own code did when this was written, and
keeps to what decides which block is found where:

- llm-d (``pkg/kvevents/pool.go``, ``pkg/kvcache/kvblock/in_memory.go`` of
  ``llm-d/llm-d-kv-cache``, 7be76e1): one entry a block of tokens, medium and
  group. A block whose parent it doesn't know is dropped; so is one without
  tokens, unless it knows its hash from another event. A removal takes the
  entry of its medium; ``AllBlocksCleared`` takes all.
- Dynamo (``lib/kv-router/src/zmq_wire`` and ``lib/kv-router/src/indexer`` of
  ``ai-dynamo/dynamo``): one index a medium, of the hashes that the engine
  gave. Remote blocks, groups that are not the main attention's, and blocks of
  another size than its own are dropped. A removal ends at the first hash that
  it doesn't know.

Both are in use with and without a filter in front of the index, and so both are
here twice. The filter counts how often a hash was announced in a medium (llm-d:
and group), and lets a removal pass with the last of them, or where it has
counted none: ``dedup.rs`` of Dynamo's publisher, but not its stand-alone indexer
(``kv_indexer/listener.rs``); the pool of ``llm-d/llm-d-router``, but not yet the
commit above. Neither router looks at the tier.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Found: TypeAlias = set[tuple[str, bytes]]
"""What an index has: the medium and the hash of each block that a request can be sent for."""

MAIN_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


class References:
    """How often each hash was announced in a place; without ``counts`` this filters nothing."""

    def __init__(self, *, counts: bool) -> None:
        self._counts = counts
        self._of: Counter[tuple[Any, bytes]] = Counter()

    def stored(self, place: Any, names: Iterable[bytes]) -> None:
        """Count an announcement that the index has taken."""
        if self._counts:
            self._of.update((place, name) for name in names)

    def removed(self, place: Any, names: Iterable[bytes]) -> Sequence[bytes]:
        """Return which the index is to remove: those that nothing else has announced."""
        passed = []
        for name in names:
            left = self._of.pop((place, name), 1) - 1
            if left:
                self._of[place, name] = left
            else:
                passed.append(name)
        return passed

    def clear(self) -> None:
        """Forget all counts, with the index."""
        self._of.clear()


class LLMDIndex:
    """One engine's part of llm-d's index. ``block_tokens``: its own block size."""

    def __init__(self, block_tokens: int, *, counts: bool) -> None:
        self._block_tokens = block_tokens
        self.counts = counts
        self._references = References(counts=counts)
        self._block_of: dict[bytes, tuple[int, ...]] = {}  # by hash: all tokens up to its end
        self._entries: dict[tuple[int, ...], set[tuple[str, int | None]]] = {}

    def apply(self, events: Iterable[Any]) -> None:
        """Fold one batch."""
        for event in events:
            kind = type(event).__name__
            if kind == "BlockStored":
                self._store(event)
            elif kind == "BlockRemoved":
                place = (_medium(event), event.group_idx)
                for name in self._references.removed(place, event.block_hashes):
                    self._remove(name, place)
            else:
                assert kind == "AllBlocksCleared", kind
                self._entries.clear()
                self._references.clear()

    def found(self, group: int | None = 0) -> Found:
        """Return what it would send requests for, in one group."""
        hashes = {block: name for name, block in self._block_of.items()}
        return {
            (medium, hashes[block])
            for block, places in self._entries.items()
            for medium, of_group in places
            if of_group == group
        }

    def _store(self, event: Any) -> None:
        place = (_medium(event), event.group_idx)
        parent: tuple[int, ...] = ()
        if event.parent_block_hash is not None:
            if event.parent_block_hash not in self._block_of:
                return
            parent = self._block_of[event.parent_block_hash]
        tokens = event.token_ids
        blocks = [
            (*parent, *tokens[:end])
            for end in range(self._block_tokens, len(tokens) + 1, self._block_tokens)
        ]
        if blocks:
            assert len(blocks) == len(event.block_hashes), "the sizes of blocks are equal"
            self._block_of.update(zip(event.block_hashes, blocks, strict=True))
        elif not tokens:
            known = self._block_of
            blocks = [known[name] for name in event.block_hashes if name in known]
        if blocks:
            self._references.stored(place, event.block_hashes)
        for block in blocks:
            self._entries.setdefault(block, set()).add(place)

    def _remove(self, name: bytes, place: tuple[str, int | None]) -> None:
        block = self._block_of.get(name)
        if block is None:
            return
        places = self._entries.get(block, set())
        places.discard(place)
        if not places:
            self._entries.pop(block, None)
            del self._block_of[name]


class DynamoIndex:
    """One worker's part of Dynamo's indexes. ``block_tokens``: its own block size."""

    def __init__(self, block_tokens: int, *, counts: bool) -> None:
        self._block_tokens = block_tokens
        self.counts = counts
        self._references = References(counts=counts)
        self._kinds: dict[int, str] = {}  # by group, as learnt
        self._edges: dict[str, dict[bytes, tuple[bytes | None, tuple[int, ...]]]] = {}

    def apply(self, events: Iterable[Any]) -> None:
        """Fold one batch."""
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self._edges.clear()
                self._references.clear()
            elif self._is_taken(event):
                if kind == "BlockStored":
                    self._store(event)
                else:
                    self._remove(event)

    def found(self) -> Found:
        """Return what it would send requests for."""
        return {(medium, name) for medium, edges in self._edges.items() for name in edges}

    def _is_taken(self, event: Any) -> bool:
        if event.locality not in (None, "LOCAL"):
            return False
        kind = getattr(event, "kv_cache_spec_kind", None)
        group = event.group_idx
        if kind is not None and group is not None:
            self._kinds[group] = kind
        if kind is None and group is not None:
            kind = self._kinds.get(group)
        return kind in MAIN_KINDS if kind is not None else group in (None, 0)

    def _store(self, event: Any) -> None:
        size = self._block_tokens
        if event.block_size != size:
            return
        edges = self._edges.setdefault(_medium(event), {})
        parent = event.parent_block_hash
        for number, name in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[number * size : (number + 1) * size])
            if len(tokens) < size:
                return
            edges.setdefault(name, (parent, tokens))
            self._references.stored(_medium(event), [name])
            parent = name

    def _remove(self, event: Any) -> None:
        edges = self._edges.get(_medium(event), {})
        for name in self._references.removed(_medium(event), event.block_hashes):
            if edges.pop(name, None) is None:
                return


def _medium(event: Any) -> str:
    return event.medium or "GPU"


def routers_of(block_tokens: int) -> dict[str, LLMDIndex | DynamoIndex]:
    """Return both routers with and without their filter, by what a message may call them."""
    return {
        "llm-d": LLMDIndex(block_tokens, counts=False),
        "llm-d, which counts": LLMDIndex(block_tokens, counts=True),
        "Dynamo": DynamoIndex(block_tokens, counts=False),
        "Dynamo, which counts": DynamoIndex(block_tokens, counts=True),
    }
