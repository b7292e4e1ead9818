"""Tracks the GPU loads in flight, by request.

A completion ends only loads that its own request began: a stray one removes
no other request's pin. Completions of loads from before a reset never get here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.plugin_api.keys import Key, RequestId


class GpuLoads:
    """Counts how often each request is loading each key."""

    def __init__(self) -> None:
        self._under_way: dict[RequestId, dict[Key, int]] = {}

    def begin(self, request: RequestId, keys: Sequence[Key]) -> None:
        """Note that the GPU begins to read ``keys``."""
        loads = self._under_way.get(request)
        once = dict.fromkeys(keys, 1)
        if loads is None and len(once) == len(keys):
            self._under_way[request] = once  # the usual case: in a tenth of the time
            return
        loads = self._under_way.setdefault(request, {})
        for key in keys:
            loads[key] = loads.get(key, 0) + 1

    def end(self, request: RequestId, keys: Sequence[Key]) -> Sequence[Key]:
        """Note that the GPU has read ``keys``; return those that it had begun to read."""
        loads = self._under_way.get(request)
        if loads is None:
            return []
        if len(loads) == len(keys) and loads == dict.fromkeys(keys, 1):
            del self._under_way[request]  # all that it loads: the usual case
            return keys
        ended = []
        for key in keys:
            count = loads.get(key)
            if count is None:
                continue
            if count > 1:
                loads[key] = count - 1
            else:
                del loads[key]
            ended.append(key)
        if not loads:
            del self._under_way[request]
        return ended

    def reset(self, slot_of: Mapping[Key, int]) -> dict[int, int]:
        """Forget all loads: a new epoch begins. Return their number for each slot."""
        reads: dict[int, int] = {}
        for loads in self._under_way.values():
            for key, count in loads.items():
                slot = slot_of[key]
                reads[slot] = reads.get(slot, 0) + count
        self._under_way.clear()
        return reads
