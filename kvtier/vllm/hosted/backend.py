"""The ``vllm`` backend: one of vLLM's own secondary tiers, unchanged, as a tier of kvtier.

vLLM's factory builds the tier from its own configuration, over kvtier's primary
tier. It runs on the tier's thread: if it blocks, the scheduler is not affected,
and kvtier's deadlines apply to requests.

vLLM's tiers keep no digest of a block. This backend remembers up to
``DIGESTS_MAX`` digests of blocks that this engine has stored. Blocks stored
elsewhere or earlier are served as vLLM serves them: unchecked. Nor can vLLM's
tiers remove a block. A damaged block is not requested again until it has been
stored again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Backend, BackendTraits, Loaded, Outcome
from kvtier.plugin_api.metrics import Counter, Gauge
from kvtier.plugin_api.threads import DaemonThreads
from kvtier.settings.hosted_tier import HostedOptions
from kvtier.settings.vllm_keys import VLLMKeys
from kvtier.vllm.hosted.connections import end_well, note_no_seed_too_early
from kvtier.vllm.hosted.finished_notifier import UNFETCHED_S, FinishedNotifier
from kvtier.vllm.hosted.jobs import HostedJobs, slots_in
from kvtier.vllm.hosted.late_writes import Peers
from kvtier.vllm.hosted.parent import Parent
from kvtier.vllm.hosted.requests import HostedRequest, PeersBlocks
from kvtier.vllm.hosted.stats import HostedStats
from kvtier.vllm.hosted.tier_class import P2P, class_of, info_of, serves_peers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from kvtier.plugin_api.backend import BackendContext, LoadBlock, ServedRequest, StoreBlock
    from kvtier.plugin_api.keys import RequestId
    from kvtier.plugin_api.metrics import BackendMetric
    from kvtier.plugin_api.slot_memory import SlotMemory

DIGESTS_MAX: Final = 1 << 18
"""Takes about 60 MB."""

_BATCHES_MAX: Final = 16  # vLLM's tiers run one job in one thread

ALL: Final = 1 << 20
"""Limits of a request-scoped tier: its jobs wait for one another, so it gets all of them, whole."""

_BATCH_BLOCKS_MAX: Final = 64


@dataclass(frozen=True)
class HostingEngine:
    """Arguments for building one of vLLM's tiers: the engine's spec and the primary's memory."""

    spec: OffloadingSpec
    memory: SlotMemory
    labels_of: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Labels that each tier reports about itself, by the tier's name."""

    stats: HostedStats = field(default_factory=HostedStats)
    """The metrics of all hosted tiers."""

    def view(self) -> memoryview:
        """Return the primary tier in the form that vLLM's tiers take: a row per slot."""
        shape = (self.memory.slot_count, self.memory.block_bytes)
        return self.memory.buffer.cast("B", shape)


class HostedBackend(Backend):
    """Hosts one ``SecondaryTierManager``. Threads: as for any ``Backend``."""

    type_name: ClassVar[str] = "vllm"
    needs_engine: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, BackendMetric]] = {
        "jobs": Gauge("Jobs at the hosted tier."),
        "unknown_jobs": Counter("Jobs reported by the hosted tier that never existed."),
        "blocks_not_trusted": Gauge("Blocks that the hosted tier returned damaged."),
    }

    def __init__(
        self,
        tier: SecondaryTierManager,
        view: memoryview,
        name: str,
        *,
        request_scoped: bool = False,
        stats: HostedStats | None = None,
    ) -> None:
        """``view``: the memory that the tier was built with. It is released with the tier."""
        batches_max = ALL if request_scoped else _BATCHES_MAX
        self.traits = BackendTraits(
            load_batches_max=batches_max,
            store_batches_max=batches_max,
            load_batch_blocks_min=ALL if request_scoped else 1,
            load_batch_blocks_max=ALL if request_scoped else _BATCH_BLOCKS_MAX,
            store_batch_blocks_max=_BATCH_BLOCKS_MAX,
            accepts_unchecked=True,
            request_scoped=request_scoped,
            serves_others=serves_peers(type(tier)),
        )
        self._tier = tier
        self._view = view
        self._jobs = HostedJobs(tier, name, self._lose, stats)
        self._notifier = FinishedNotifier(tier)
        self._peers: Peers | None = None
        if serves_peers(type(tier)):
            self._peers = Peers(tier, name, self._jobs)
            end_well(tier._control)  # noqa: SLF001 - before it has any connection
            note_no_seed_too_early(tier)
            self._jobs.also(Parent(tier, self, self._jobs, view).serve, self._notifier.tell)
        self._steps: asyncio.Task[None] | None = None
        self._closing = DaemonThreads(1, f"kvtier-{name}-close")
        self._is_ending = False  # and may hold on to the memory
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()  # stored longest ago first
        self._damaged: set[bytes] = set()

    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: BackendContext) -> HostedBackend:
        """Build the tier with vLLM's factory. Raises ``ConfigError``."""
        where = f"secondary tier {context.tier_name}"
        given = HostedOptions.read(options, where)
        tier = dict(given.tier)
        for key in options["tier"].keys() - tier:
            VLLMKeys()(key, str(tier.get("type")))  # the log says that it is ignored
        if tier.get("type") == P2P:
            # Blocks that no peer fetches are released before the store is late.
            tier.setdefault("unbound_store_timeout_s", UNFETCHED_S)
        found = class_of(tier, where)
        engine = context.engine
        if not isinstance(engine, HostingEngine):
            raise ConfigError(
                f"{where}: type='vllm' needs an engine of vLLM's, and there is none here. Choose "
                "another type."
            )
        if context.namespace.vllm_refusal:
            raise ConfigError(f"{where}: type='vllm' {context.namespace.vllm_refusal}.")
        view = engine.view()
        try:
            built = SecondaryTierFactory.create_secondary_tier(tier, view, engine.spec)
        except Exception as error:
            view.release()
            raise ConfigError(
                f"{where}: vLLM can't build its tier {tier['type']!r} ({type(error).__name__}: "
                f"{error}). Correct the entry in tier, install its requirements, or remove the "
                "tier."
            ) from error
        name, request_scoped = context.tier_name, given.request_scoped or serves_peers(found)
        with ExitStack() as undo:
            undo.callback(view.release)
            undo.callback(built.shutdown)  # it may hold a port
            engine.labels_of[name] = info_of(built, name)
            made = cls(built, view, name, request_scoped=request_scoped, stats=engine.stats)
            undo.pop_all()
        return made

    @classmethod
    def check_keys(cls, options: Mapping[str, Any], context: BackendContext) -> None:
        """Refuse errors that can be found without building the tier."""
        cls.check_options(options, context)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], context: BackendContext) -> None:
        """Refuse errors that can be found without building the tier."""
        _class_of(options, f"secondary tier {context.tier_name}")

    @classmethod
    def medium_of(cls, options: Mapping[str, Any]) -> str | None:
        """Return the medium of the hosted tier; None if it has none."""
        medium = _class_of(options).medium
        return None if medium is None else str(medium.value)

    @classmethod
    def hit_source_of(cls, options: Mapping[str, Any]) -> CacheHitSource:
        """Return vLLM's name for a hit in the hosted tier."""
        return _class_of(options).cache_hit_source

    def discard(self) -> None:
        """Shut down the tier, which has done nothing yet: it may hold a port."""
        self._tier.shutdown()
        self._view.release()

    def begin_request(self, request: RequestId, params: Mapping[str, Any]) -> ServedRequest:
        """Announce one of the engine's requests to the tier."""
        context = ReqContext(req_id=request, kv_transfer_params=dict(params))
        if self._peers is not None:
            return PeersBlocks(
                self._tier, self._jobs, self._view, context, self._peers, self._notifier
            )
        return HostedRequest(self._tier, self._jobs, self._view, context)

    async def open(self) -> None:
        """Begin the tier's steps."""
        self._steps = asyncio.create_task(self._jobs.go_on())

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Look the keys up."""
        wanted = [key for key in keys if key not in self._damaged]
        found = dict(zip(wanted, await self._look_up(wanted), strict=True)) if wanted else {}
        return [found.get(key, False) for key in keys]

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Load the blocks with one job. Others are looked up again: absent, or failed."""
        wanted = [block for block in blocks if block.key not in self._damaged]
        outcomes = dict.fromkeys((block.key for block in blocks), Outcome.ABSENT)
        if wanted:
            outcomes.update(await self._load(wanted))
        return [Loaded(outcomes[block.key], self._digests.get(block.key)) for block in blocks]

    async def _look_up(self, keys: Sequence[bytes]) -> list[bool]:
        with self._jobs.request() as context:
            return await self._jobs.look_up(keys, context, lambda: False)

    async def _load(self, blocks: Sequence[LoadBlock]) -> dict[bytes, Outcome]:
        keys = [block.key for block in blocks]
        slots = slots_in(self._view, (block.buffer for block in blocks))
        with self._jobs.request() as context:
            result = await self._jobs.run(
                self._tier.submit_load, keys, slots, context, is_promotion=True
            )
        loaded = keys if result.success else list(result.successful_keys or ())
        outcomes = dict.fromkeys(loaded, Outcome.DONE)
        rest = [key for key in keys if key not in outcomes]
        if rest:
            # vLLM's tiers don't report whether their storage failed or the block was gone.
            there = await self._look_up(rest)
            outcomes.update(
                (key, Outcome.FAILED if is_there else Outcome.ABSENT)
                for key, is_there in zip(rest, there, strict=True)
            )
        return outcomes

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Store the blocks with one job, which succeeds or fails as a whole."""
        keys = [block.key for block in blocks]
        slots = slots_in(self._view, (block.buffer for block in blocks))
        with self._jobs.request() as context:
            result = await self._jobs.run(
                self._tier.submit_store, keys, slots, context, is_promotion=False
            )
        if not result.success:
            return [Outcome.FAILED] * len(blocks)
        self._remember(blocks)
        return [Outcome.DONE] * len(blocks)

    def _remember(self, blocks: Sequence[StoreBlock]) -> None:
        for block in blocks:
            self._damaged.discard(block.key)
            self._digests[block.key] = block.digest
            self._digests.move_to_end(block.key)
        while len(self._digests) > DIGESTS_MAX:
            self._digests.popitem(last=False)

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Stop requesting these until they are stored again: vLLM's tiers remove nothing."""
        for key in keys:
            self._digests.pop(key, None)
            self._damaged.add(key)

    async def close(self) -> None:
        """Shut down the tier once its jobs have ended. Either may hang."""
        if self._steps is not None:
            self._steps.cancel()
        await self._closing.run(self._end)
        self._closing.stop()
        if self._peers is not None:
            self._peers.stop()

    def _end(self) -> None:
        self._is_ending = True  # permanently, if any of this raises
        try:
            self._tier.drain_jobs()
        finally:
            self._tier.shutdown()
        self._view.release()  # raises if the tier still holds the memory
        self._jobs.forget()
        self._is_ending = False

    def _lose(self, keys: list[bytes]) -> None:
        self.on_lost(keys)  # set once this is built

    def busy_threads(self) -> int:
        """Count jobs in flight, writes that peers may still do, and the tier while it ends."""
        held = 0 if self._peers is None else self._peers.held
        return self._jobs.under_way + held + self._is_ending

    def counters(self) -> Mapping[str, int]:
        """Return the counts that only this backend has."""
        return {
            "jobs": self._jobs.under_way,
            "unknown_jobs": self._jobs.unknown,
            "blocks_not_trusted": len(self._damaged),
        }


def _class_of(
    options: Mapping[str, Any], where: str = "secondary tier of type vllm"
) -> type[SecondaryTierManager]:
    return class_of(HostedOptions.read(options, where).tier, where)
