"""Serves one of the engine's requests at one of vLLM's request-scoped tiers.

The tier sees the request as vLLM's manager would show it: its id and its
``kv_transfer_params``. No digests are kept: a block loaded for one request serves no other.

The policy that the tier returns for the request decides which blocks it gets: with ``CHUNK_LEVEL``
those that the request itself has stored, with ``REQUEST_LEVEL`` also those that were in host memory
before. Both are offered, since vLLM needs the policy before the tier can be queried.
"""

from __future__ import annotations

import asyncio
from itertools import compress
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import OffloadPolicy

from kvtier.plugin_api.backend import Loaded, Outcome, ServedRequest
from kvtier.vllm.hosted.jobs import slots_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    from kvtier.plugin_api.backend import LoadBlock, StoreBlock
    from kvtier.vllm.hosted.finished_notifier import FinishedNotifier
    from kvtier.vllm.hosted.jobs import HostedJobs
    from kvtier.vllm.hosted.late_writes import Peers


class HostedRequest(ServedRequest):
    """Announces a request to the tier when created; ``end`` notifies the tier of its end."""

    def __init__(
        self,
        tier: SecondaryTierManager,
        jobs: HostedJobs,
        view: memoryview,
        context: ReqContext,
    ) -> None:
        self._tier = tier
        self._jobs = jobs
        self._view = view
        self._context = context
        self._is_over = False
        self._skipped: set[bytes] = set()  # blocks not to be sent to the tier
        self._is_whole = tier.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Look the keys up, until the request is over."""
        return await self._jobs.look_up(keys, self._context, self.is_over)

    def is_over(self) -> bool:
        """Return whether the request has ended."""
        return self._is_over

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Load the blocks with one job. Those that it did not load are absent for the request."""
        if self._is_over:
            return [Loaded(Outcome.ABSENT)] * len(blocks)
        keys = [block.key for block in blocks]
        slots = slots_in(self._view, (block.buffer for block in blocks))
        result = await self._jobs.run(
            self._tier.submit_load, keys, slots, self._context, is_promotion=True
        )
        loaded = set(keys if result.success else result.successful_keys or ())
        return [Loaded(Outcome.DONE if key in loaded else Outcome.ABSENT) for key in keys]

    def prefix_hits(self, keys: Sequence[bytes]) -> None:
        """Note the blocks that were here before the request; the tier may not want them."""
        if not self._is_whole:
            self._skipped.update(keys)

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Store the blocks with one job. It is not a failure if no peer fetches them."""
        wanted = [block for block in blocks if block.key not in self._skipped]
        self._skipped.difference_update([block.key for block in blocks])  # each is skipped once
        taken = set(await self._store(wanted)) if wanted else set()
        return [Outcome.DONE if block.key in taken else Outcome.ABSENT for block in blocks]

    async def _store(self, blocks: Sequence[StoreBlock]) -> Sequence[bytes]:
        keys = [block.key for block in blocks]
        slots = slots_in(self._view, (block.buffer for block in blocks))
        result = await self._jobs.run(
            self._tier.submit_store, keys, slots, self._context, is_promotion=False
        )
        return keys if result.success else ()

    def end(self) -> None:
        """Notify the tier that the request is over."""
        self._is_over = True
        self._tier.on_request_finished(self._context)


class PeersBlocks(HostedRequest):
    """A request at vLLM's ``p2p`` tier, which may load from a peer, or supply one."""

    def __init__(
        self,
        tier: SecondaryTierManager,
        jobs: HostedJobs,
        view: memoryview,
        context: ReqContext,
        peers: Peers,
        takers: FinishedNotifier,
    ) -> None:
        super().__init__(tier, jobs, view, context)
        self._peers = peers
        self._notifier = takers
        self._submitting = asyncio.Lock()
        params = context.kv_transfer_params or {}
        self._has_taker = "remote_decoder" in params
        self._comes_once = "remote_prefiller" in params
        self._loads = 0  # not yet ended by the tier
        self._has_loaded = False
        self._stores = 0  # not yet ended by the tier
        self._has_stored = False

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Have the peer write the blocks that it has. Returns when it will not write any more.

        A load ends the peer's pins for the request, so another load must look up again: loads run
        one after the other, each together with its lookup. A prefill engine releases the blocks
        kept for the request with the first load, and would never respond to another.
        """
        async with self._submitting:
            keys = [block.key for block in blocks]
            if self._comes_once and self._has_loaded:
                return [Loaded(Outcome.ABSENT)] * len(keys)
            there = set(compress(keys, await self.probe(keys)))
            wanted = [block for block in blocks if block.key in there]
            peer = self._peers.peer_of(self._context)
            if not (wanted and peer and await peer.answers(self.is_over)):
                return [Loaded(Outcome.ABSENT)] * len(blocks)
            slots = slots_in(self._view, (block.buffer for block in wanted))
            wanted_keys = [block.key for block in wanted]
            job, ended = self._jobs.new_job(wanted_keys, slots, self._context, is_promotion=True)
            self._jobs.submit(self._tier.submit_load, job)
            self._loads += 1
            self._has_loaded = True
        result = await asyncio.shield(ended)
        is_said = result.success or peer.has_said_so()
        # Not in a finally: a wait is cancelled when the tier ends, and the tier still has the load.
        self._loads -= 1
        self._jobs.goes_well(self._finish_if_over)
        if not is_said:
            peer.end_if_deaf()
            await peer.stop_writes()
        loaded = there if result.success else set()
        return [Loaded(Outcome.DONE if key in loaded else Outcome.ABSENT) for key in keys]

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Keep the blocks for the peer that the request is computed for, if there is one."""
        if not self._has_taker:
            return [Outcome.ABSENT] * len(blocks)
        self._stores += 1
        self._has_stored = True
        try:
            return await super().store(blocks)
        finally:
            self._stores -= 1

    def end(self) -> None:
        """Notify the tier that the request is over, once its loads are: else it would abort them.

        A peer whose load is aborted may continue writing for a while. If it is not interrupted, it
        reports when it is done.
        """
        self._is_over = True
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        if self._is_over and not self._loads:
            self._tier.on_request_finished(self._context)
            if self._has_taker:
                self._notifier.add(self._context, lambda: self._stores > 0 or not self._has_stored)
