"""Runs lookups of requests whose keys belong to several KV-cache groups, one step at a time.

vLLM looks up key after key. Promotions are decided once it has looked up all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.vllm.scheduler.groups import GroupLookup

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.core.block_state import BlockState
    from kvtier.engine.facade import SchedulerFacade
    from kvtier.vllm.scheduler.groups import Groups
    from kvtier.vllm.scheduler.prefill_steps import PrefillSteps
    from kvtier.vllm.scheduler.requests import RequestState


class GroupLookups:
    """Requests' lookup results in this step, and the prefixes reserved for them at its end."""

    def __init__(self, facade: SchedulerFacade, groups: Groups, steps: PrefillSteps) -> None:
        self._facade = facade
        self._groups = groups
        self._steps = steps
        self._of: dict[RequestState, GroupLookup] = {}

    def __contains__(self, request: RequestState) -> bool:
        """Return whether a request has looked up keys in this step."""
        return request in self._of

    def begin(self, request: RequestState, end_of: dict[bytes, int]) -> None:
        """Note that a request looks up its first key in this step."""
        self._of[request] = GroupLookup(self._groups, end_of)

    def look_up(self, key: bytes, request: RequestState, end_of: dict[bytes, int]) -> BlockState:
        """Look up a block; return its state."""
        if end_of.get(key, 1) % self._groups.chunk_tokens.get(key[-GROUP_BYTES:], 1):
            return self._facade.lookup_state(key, request.name)  # a partial tail: one a group
        state = self._facade.survey(key, request.name)
        self._of[request].note(key, state)
        return state

    def mark_decided(self, request: RequestState) -> None:
        """Note that a request loads or stores: the GPU has the tokens before its first key."""
        asked = self._of.get(request)
        start = None if asked is None else asked.tell_start()
        if asked is not None and start is not None:
            self._steps.looks_up_from(request.prompt, start, asked.end_of)

    def reserve(self, is_undecided: Callable[[str], bool]) -> None:
        """Promote the blocks that still-waiting requests need, in vLLM's order."""
        for request in self._of:
            self.mark_decided(request)
        passes, self._of = self._of, {}
        for request, asked in passes.items():
            was_refused = request.was_refused
            request.refuse(is_refused=False)
            if not (is_undecided(request.name) and (was_refused or asked.waits_for_blocks())):
                continue
            wanted, start = asked.wanted(), asked.start()
            if not self._facade.reserve_prefix(wanted, request.name, start) and not was_refused:
                request.refuse(is_refused=True)

    def clear(self) -> None:
        """Forget all: the blocks found are gone."""
        self._of.clear()
