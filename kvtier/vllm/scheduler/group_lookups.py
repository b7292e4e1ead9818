"""Runs lookups of requests whose keys belong to several KV-cache groups, one step at a time.

vLLM looks up key after key. Promotions are decided once it has looked up all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.vllm.scheduler.groups import GroupLookup

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvtier.core.block_state import BlockState
    from kvtier.engine.facade import SchedulerFacade
    from kvtier.vllm.scheduler.groups import Groups
    from kvtier.vllm.scheduler.prefill_steps import PrefillSteps


class GroupLookups:
    """Requests' lookup results in this step, and the prefixes reserved for them at its end."""

    def __init__(self, facade: SchedulerFacade, groups: Groups, steps: PrefillSteps) -> None:
        self._facade = facade
        self._groups = groups
        self._steps = steps
        self._of: dict[str, GroupLookup] = {}
        self._refused: set[str] = set()  # requests whose prefix had no room in the last step

    def __contains__(self, request: str) -> bool:
        """Return whether a request has looked up keys in this step."""
        return request in self._of

    def begin(self, request: str, end_of: dict[bytes, int]) -> None:
        """Note that a request looks up its first key in this step."""
        self._of[request] = GroupLookup(self._groups, end_of)

    def look_up(self, key: bytes, request: str, end_of: dict[bytes, int]) -> BlockState:
        """Return where the block is."""
        if end_of.get(key, 1) % self._groups.chunk_tokens.get(key[-GROUP_BYTES:], 1):
            return self._facade.lookup_state(key, request)  # a partial tail: one block a group
        state = self._facade.survey(key, request)
        self._of[request].note(key, state)
        return state

    def mark_decided(self, request: str) -> None:
        """Note that a request loads or stores: the GPU has the tokens before its first key."""
        asked = self._of.get(request)
        start = None if asked is None else asked.tell_start()
        if asked is not None and start is not None:
            self._steps.looks_up_from(request, start, asked.end_of)

    def reserve(self, undecided: Collection[str]) -> None:
        """Promote the blocks that still-waiting requests need, in vLLM's order."""
        for request in self._of:
            self.mark_decided(request)
        passes, self._of = self._of, {}
        for request, asked in passes.items():
            was_refused = request in self._refused
            self._refused.discard(request)
            if request not in undecided or not (was_refused or asked.waits_for_blocks()):
                continue
            wanted = asked.wanted()
            if not self._facade.reserve_prefix(wanted, request, asked.start()) and not was_refused:
                self._refused.add(request)

    def end(self, request: str) -> None:
        """Forget a request."""
        self._refused.discard(request)

    def clear(self) -> None:
        """Forget all: the blocks found are gone."""
        self._of.clear()
        self._refused.clear()
