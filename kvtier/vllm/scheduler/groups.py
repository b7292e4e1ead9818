"""Relates one request's keys of several KV-cache groups to one another.

vLLM publishes the token that each key ends at, and looks keys up group by
group: with full attention from head to tail, up to the first miss; with a
sliding window (or a recurrent state) from the tail on, until it has found a
window's length. The kind of each group comes from vLLM's configuration
(``memory/group_kinds.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from typing import TYPE_CHECKING

from kvtier.core.block_state import BlockState
from kvtier.core.messages import GroupKeys, RequestOrder
from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.vllm.memory.group_kinds import group_kinds

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from vllm.v1.kv_offload.base import OffloadingSpec

    from kvtier.vllm.memory.group_kinds import GroupKind

_NO_END = 1 << 62  # for keys without a position from vLLM: behind all others


def in_token_order(keys: Collection[bytes], end_of: Mapping[bytes, int]) -> list[bytes]:
    """Return keys of several groups in the order of the tokens that they end at."""
    return sorted(keys, key=lambda key: end_of.get(key, _NO_END))


class TokenOrder:
    """The order of one request's keys, reported in batches. It grows while the request computes.

    ``chunk_tokens``: how many tokens each key covers, if there is one group; else None.
    """

    __slots__ = ("_chunk_tokens", "_told_count", "_told_end")

    def __init__(self, chunk_tokens: int | None) -> None:
        self._chunk_tokens = chunk_tokens
        self._told_count = 0
        self._told_end = 0  # tokens

    def untold(self, end_of: dict[bytes, int]) -> RequestOrder | None:
        """Return the keys not reported yet, by token, and count them as reported; None: no keys.

        Returns all keys if a new one comes before one that was reported.
        """
        first = self._told_count
        new = len(end_of) - first
        if not new:
            return None
        last = next(reversed(end_of.values()))
        if self._chunk_tokens is not None and last == len(end_of) * self._chunk_tokens:
            # No partial tail among them: they are in order. This takes a tenth of the time.
            self._told_count, self._told_end = len(end_of), last
            return RequestOrder(first, tuple(islice(reversed(end_of), new))[::-1])
        ends = list(islice(reversed(end_of.values()), new))[::-1]
        if min(ends) < self._told_end:
            first, ends = 0, list(end_of.values())
        keys = tuple(islice(reversed(end_of), len(ends)))[::-1]
        in_order = sorted(ends)
        if ends != in_order:  # several groups: one comes after the other
            keys = tuple(sorted(keys, key=end_of.__getitem__))
        self._told_count = len(end_of)
        self._told_end = in_order[-1]
        return RequestOrder(first, keys)


class Chains:
    """One request's keys, each with the one before it in its own group."""

    __slots__ = ("by_end", "count", "parents")

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes] = {}
        self.by_end: dict[tuple[bytes, int], bytes] = {}
        self.count = 0  # of the request's keys already processed


class Parents:
    """Finds the block before each block of a request, in groups with full attention."""

    def __init__(self, groups: Groups) -> None:
        self._chunk_tokens = {
            group: tokens
            for group, tokens in groups.chunk_tokens.items()
            if groups.kinds[group].window is None
        }

    def of(self, chains: Chains, end_of: dict[bytes, int]) -> Mapping[bytes, bytes]:
        """Return the parents of a request's keys; the first of each group has none."""
        new = len(end_of) - chains.count
        if new:
            chains.count += new
            for key, end in list(islice(reversed(end_of.items()), new))[::-1]:
                group = key[-GROUP_BYTES:]
                tokens = self._chunk_tokens.get(group)
                if tokens is not None:
                    chains.by_end[group, end] = key
                    # For the tail of a prompt, a partial block, the parent is the last whole one.
                    parent = chains.by_end.get((group, (end - 1) // tokens * tokens))
                    if parent is not None:
                        chains.parents[key] = parent
        return chains.parents


class Groups:
    """The groups of one model, by the last bytes of their keys."""

    def __init__(
        self, chunk_tokens: Mapping[bytes, int], kinds: Mapping[bytes, GroupKind], chunk_blocks: int
    ) -> None:
        """``chunk_tokens``: how many tokens a key of each group covers.

        ``chunk_blocks``: how many vLLM blocks.
        """
        self.chunk_tokens = chunk_tokens
        self.kinds = kinds
        windows = any(kind.window is not None for kind in kinds.values())
        self.have_windows = windows
        self.lose_blocks = chunk_blocks > 1 and windows
        """Whether some of a chunk's blocks may have left a window since vLLM first offered it."""

    @classmethod
    def of(cls, spec: OffloadingSpec) -> Groups:
        """Return the groups of an engine."""
        blocks = int(spec.blocks_per_chunk)
        chunk_tokens = {
            group.group_id.to_bytes(GROUP_BYTES, "big"): group.tokens_per_block * blocks
            for group in spec.config.groups
        }
        return cls(chunk_tokens, group_kinds(spec), blocks)

    def cuts(self, keys: Sequence[bytes], end_of: Mapping[bytes, int]) -> list[int]:
        """Return each number of first ``keys``, in token order, that is usable without the rest.

        All keys together always are. Fewer are if no later key ends at the same token, and every
        group has what it needs before that token: back to the offer's start, or a whole window.
        """
        runs = self._runs(keys, end_of)
        ends = [end_of.get(key, _NO_END) for key in keys]
        cuts = [
            number
            for number in range(1, len(keys))
            if ends[number - 1] < ends[number]
            and all(self._is_served(each, ends[number - 1]) for each in runs.values())
        ]
        return [*cuts, len(keys)]

    def _runs(
        self, keys: Sequence[bytes], end_of: Mapping[bytes, int]
    ) -> dict[bytes, list[tuple[int, int, bool]]]:
        """Return each group's runs of keys: first token, end, whether the offer begins there.

        Windows may begin later than the offer; blocks missing before them are not offered.
        """
        runs: dict[bytes, list[tuple[int, int, bool]]] = {}
        for key in keys:
            group = key[-GROUP_BYTES:]
            end = end_of.get(key, _NO_END)
            chunk = self.chunk_tokens.get(group, 1)
            of_group = runs.setdefault(group, [])
            if of_group and of_group[-1][1] == end - chunk:
                of_group[-1] = (of_group[-1][0], end, False)
            else:
                of_group.append((end - chunk, end, False))
        start = min((each[0][0] for each in runs.values()), default=0)
        return {
            group: [(first, end, first <= start) for first, end, _ in of_group]
            for group, of_group in runs.items()
        }

    @staticmethod
    def _is_served(runs: Sequence[tuple[int, int, bool]], tokens: int) -> bool:
        number = bisect_right(runs, tokens, key=lambda run: run[0]) - 1
        if number < 0:
            return False
        _, end, begins_with_offer = runs[number]
        return tokens <= end and (begins_with_offer or tokens == end)


class GroupLookup:
    """One request's lookup results in one step, key by key."""

    def __init__(self, groups: Groups, end_of: Mapping[bytes, int]) -> None:
        self._groups = groups
        self.end_of = end_of
        self.is_told = False  #: whether ``tell_start`` has returned what the GPU has of it
        self._asked: dict[bytes, list[tuple[int, BlockState]]] = {}  # by group, in vLLM's order
        self._states: set[BlockState] = set()

    def note(self, key: bytes, state: BlockState) -> None:
        """Note a lookup result."""
        end = self.end_of.get(key)
        if end is not None:
            self._asked.setdefault(key[-GROUP_BYTES:], []).append((end, state))
            self._states.add(state)

    def tell_start(self) -> int | None:
        """Return ``start()`` once; None: it was returned before."""
        if self.is_told:
            return None
        self.is_told = True
        return self.start()

    def waits_for_blocks(self) -> bool:
        """Return whether vLLM waits for blocks to arrive, and no longer for tier lookups."""
        return BlockState.FILLING in self._states and BlockState.PROBING not in self._states

    def wanted(self) -> list[GroupKeys]:
        """Return the keys to reserve a prefix of, by group; empty if nothing can be loaded."""
        keys: dict[bytes, list[tuple[int, bytes]]] = {}
        for key, end in self.end_of.items():
            group = key[-GROUP_BYTES:]
            if end % self._groups.chunk_tokens.get(group, 1) == 0:  # not a partial tail
                keys.setdefault(group, []).append((end, key))
        if keys.keys() - self._asked.keys():
            return []  # vLLM has not looked up all groups: it loads nothing
        start = self.start()
        return [self._group(group, sorted(each), start) for group, each in keys.items()]

    def start(self) -> int:
        """Return the number of tokens that the GPU has: those before the first key looked up."""
        return min(
            (
                asked[0][0] - self._groups.chunk_tokens[group]
                for group, asked in self._asked.items()
                if self._groups.kinds[group].window is None
            ),
            default=0,
        )

    def _group(self, group: bytes, keys: list[tuple[int, bytes]], start: int) -> GroupKeys:
        last = max(end for end, _ in self._asked[group])
        span = [(end, key) for end, key in keys if start < end <= last]
        return GroupKeys(
            tuple(key for _, key in span),
            tuple(end for end, _ in span),
            *self._groups.kinds[group],
        )
