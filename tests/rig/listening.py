"""Routers that hear an engine's KV events: at rest their indexes have what kvtier has.

They fold events by the rules in ``tests/vllm/support/routers.py``. They must not have
a block that is nowhere, and they must have each block of the main attention that
is somewhere and that vLLM can describe.

What a tier has is asked of the tier: the engine forgets it once a load has failed or is
late, and its requests forget what they were told. No router hears of that, nor should it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.core.generations import mark_of, unmarked
from tests.rig.layers import BLOCK_TOKENS
from tests.vllm.support.routers import DynamoIndex, routers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.rig.shape import Shape
    from tests.vllm.support.routers import Found

_MAIN = bytes(4)  #: the end of a key: its group


class Listener:
    """Routers, in the place of vLLM's publisher."""

    def __init__(self, shape: Shape, scheduler: Any) -> None:
        self._shape = shape
        self._scheduler = scheduler
        self._routers = routers_of(BLOCK_TOKENS * shape.contexts)
        self._requests: list[Any] = []
        self.was_told_to_forget = False  #: by vLLM, whose own cache alone was reset
        scheduler.kv_event_publisher = self

    # --- what vLLM asks of a publisher ---

    def publish(self, batch: Any) -> None:
        self._hear(list(batch.events))

    def shutdown(self) -> None:
        """Do nothing: there is no socket."""

    # --- what a scenario asks ---

    def meet(self, request: Any) -> None:
        """Learn what the blocks of a request are called. Its output adds to them."""
        self._requests.append(request)

    def differences(self) -> dict[str, Any]:
        """Return what is wrong with the indexes, at rest, once all has been told."""
        self._hear(list(self._scheduler.connector.take_events()))
        there, must = self._places()
        # A reset of vLLM's own cache alone tells routers to forget all, and kvtier nothing. Then
        # Dynamo stops at the first hash of a removal that it doesn't know, and keeps the others.
        # llm-d knows a block by its tokens alone.
        of_dynamo = {
            who: router.found()
            for who, router in self._routers.items()
            if isinstance(router, DynamoIndex)
            if not (self._shape.forgets or self.was_told_to_forget)
        }
        of_llmd = {
            who: router.found()
            for who, router in self._routers.items()
            if not isinstance(router, DynamoIndex)
            and not (self._shape.salted or self._shape.adapters)
        }
        told = {
            f"nowhere, but {who} finds it": _offloaded(known) - there
            for who, known in {**of_dynamo, **of_llmd}.items()
        }
        for who, known in of_dynamo.items():
            told[f"there, but {who} does not find it"] = must - known
        return {what: which for what, which in told.items() if which}

    def _hear(self, events: list[Any]) -> None:
        # Of windows on the GPU vLLM tells more tokens than blocks: some have left the window.
        events = [each for each in events if not getattr(each, "group_idx", None)]
        for router in self._routers.values():
            router.apply(events)

    def _places(self) -> tuple[Found, Found]:
        """Return where each block of the main group is, and what of it must be found."""
        # By key: what events call each block of the main group.
        names = {
            bytes(each) + _MAIN: maybe_convert_block_hash(each)
            for request in self._requests
            for each in request.block_hashes
        }
        connector = self._scheduler.connector.connector_scheduler
        described = connector._events_tracker._pending_event_metadata
        facade = connector.manager.facade
        resident = [("CPU", key) for key in facade._primary.resident()]
        there, must = resident.copy(), resident
        known = facade._primary.audit().directory.known
        for number, tier in enumerate(self._shape.tiers):
            medium = {"memory": "CPU"}.get(tier["type"], "STORAGE")
            has = [(medium, key) for key in _keys_of(facade, number)]
            there += has
            if facade.evicts(number):
                must += has
            else:  # nobody tells the engine of blocks that others left there
                must += [(medium, key) for key, tiers in known.items() if tiers >> number & 1]
        return (
            {(medium, names[key]) for medium, key in there if key in names},
            {(medium, names[key]) for medium, key in must if key in names and key in described},
        )


def _keys_of(facade: Any, number: int) -> Iterable[bytes]:
    """Return what a tier has of the generation that the engine is in."""
    cell, mark = facade._tiers[number]._cell, facade._links[number]._probes.mark
    if cell is None:
        return ()
    if facade.evicts(number):
        keys = cell._tier.audit().resident
    else:
        keys = {bytes.fromhex(each.stem) for each in Path(cell._backend._root).rglob("*.kv")}
    return unmarked([key for key in keys if mark_of(key) == mark], mark)


def _offloaded(found: Found) -> Found:
    return {(medium, name) for medium, name in found if medium != "GPU"}
