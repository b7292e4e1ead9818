"""Acts as vLLM's manager for a tier that serves other engines, by messages to the primary tier.

The tier looks up keys for a peer's request. ``lookup`` returns RETRY until the primary tier has
pinned the block. So HIT stays true for as long as the peer may read the block, and the job that
the tier then creates can begin at once. Only host memory is searched: the peer recomputes blocks
in other tiers, or finds them there itself.

A pin ends with the job that reads the block; if no job took it, with the peer's request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from typing_extensions import override
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import ParentManager

from kvtier.plugin_api.backend import Loaded, Outcome, ServedRequest
from kvtier.vllm.hosted.jobs import slots_in

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

    from kvtier.plugin_api.backend import Backend, LoadBlock, StoreBlock
    from kvtier.vllm.hosted.jobs import HostedJobs


class _Pin:
    """A block that the primary tier has pinned."""

    __slots__ = ("released", "slot")

    def __init__(self, slot: int, released: asyncio.Future[None]) -> None:
        self.slot = slot
        self.released = released

    def end(self) -> None:
        """Return it to the primary tier."""
        if not self.released.done():
            self.released.set_result(None)


class PeerRequest(ServedRequest):
    """A peer's request: the blocks it has looked up, and those pinned for it."""

    def __init__(self, view: memoryview) -> None:
        self.to_ask: list[bytes] = []
        self._view = view
        self._found: dict[bytes, _Pin | None] = {}  # None: looked up, but not pinned
        self._missing: set[bytes] = set()
        self._is_over = False

    def look_up(self, key: bytes) -> LookupResult:
        """Return whether the block is pinned; request it the first time."""
        if key not in self._found:
            self._found[key] = None
            self.to_ask.append(key)
        if self._found[key] is not None:
            return LookupResult.HIT
        return LookupResult.MISS if key in self._missing else LookupResult.RETRY

    def pop(self, keys: Collection[bytes]) -> list[_Pin]:
        """Remove and return the pins of blocks, for a job. Raises ``KeyError``."""
        pins = [pin for key in keys if (pin := self._found.get(key)) is not None]
        if len(pins) < len(keys):
            raise KeyError("a job for blocks whose lookup did not return HIT")
        for key in keys:
            del self._found[key]
        return pins

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Keep the blocks pinned until their job has ended, or without a job the request."""
        slots = slots_in(self._view, (block.buffer for block in blocks))
        loop = asyncio.get_running_loop()
        waited = []
        for block, slot in zip(blocks, slots, strict=True):
            if not self._is_over and self._found.get(block.key, block) is None:  # and looked up
                pin = self._found[block.key] = _Pin(slot, loop.create_future())
                waited.append(pin.released)
        await asyncio.gather(*waited)
        return [Outcome.ABSENT] * len(blocks)

    def missing(self, keys: Sequence[bytes]) -> None:
        """Return MISS for these from now on."""
        self._missing.update(keys)

    def end(self) -> None:
        """Release the blocks that no job took."""
        self._is_over = True
        for pin in self._found.values():
            if pin is not None:
                pin.end()

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return False for each key: it is not a request of this engine."""
        return [False] * len(keys)

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Load nothing: it is not a request of this engine."""
        return [Loaded(Outcome.ABSENT)] * len(blocks)


class Parent(ParentManager):  # type: ignore[misc]  # vllm has no stubs
    """Serves a tier's lookups for its peers. All on the loop's thread."""

    def __init__(
        self, tier: SecondaryTierManager, backend: Backend, jobs: HostedJobs, view: memoryview
    ) -> None:
        self._tier = tier
        self._backend = backend
        self._jobs = jobs
        self._view = view
        self._open: dict[str, PeerRequest] = {}

    def serve(self) -> None:
        """Let the tier serve its peers, and request the looked-up blocks from the primary tier."""
        try:
            self._tier.serve_external_requests(self)
        finally:
            self._ask()

    def _ask(self) -> None:
        for name, each in self._open.items():
            if each.to_ask:
                self._backend.on_wanted(_named(name), each.to_ask, each)
                each.to_ask = []

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._open[req_context.req_id] = PeerRequest(self._view)
        return RequestOffloadingContext()

    @override
    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        return self._open[req_context.req_id].look_up(key)

    @override
    def create_store_job(self, keys: Collection[bytes], req_context: ReqContext) -> TransferJob:
        ordered = list(keys)
        pins = self._open[req_context.req_id].pop(ordered)
        slots = [pin.slot for pin in pins]
        job, ended = self._jobs.new_job(ordered, slots, req_context, is_promotion=False)

        def release(_ended: asyncio.Future[JobResult]) -> None:
            for pin in pins:
                pin.end()

        ended.add_done_callback(release)
        return job

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        ended = self._open.pop(req_context.req_id, None)
        if ended is not None:
            ended.end()
            self._backend.on_wanted_no_more(_named(req_context.req_id))


def _named(peers_request: str) -> str:
    """Return a name that none of the engine's own requests has."""
    return f"\x00peer:{peers_request}"
