"""What one rank's model runner does in a step, with the fake model in place of the real one.

The order is that of vLLM's runner: stores of the last step are submitted, new blocks
are zeroed, blocks copied, the model runs, loads are submitted. The model first reads
all that attention would read, and compares it with what the model once wrote there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec, iter_layer_specs
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from tests.rig.fake_model import Asked, Prefix, salts_of, written
from tests.rig.layers import WORD_BYTES, own_bytes
from tests.rig.slot_watch import SlotWatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from numpy.typing import NDArray
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from tests.rig.device import Device

    _Places = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
    """Tokens, and where each one's KV is: the block, and the place in it."""


class WrongKV(AssertionError):
    """Raised when attention would have read what the model never wrote there."""


class CopiedTooEarly(AssertionError):
    """Raised when vLLM has a block copied before what the copy is for has been computed.

    Its own cache finds tokens there that the same step is to compute, for another request. No
    connector has a part in that. Seen with ``prefix_match_unit`` in one of 4,000 scenarios.
    """


@dataclass
class World:
    """What all ranks share, and a scenario changes."""

    weights: int = 0
    asked: dict[str, Asked] = field(default_factory=dict)  #: by request
    tokens_checked: int = 0
    steps_computed: int = 0  #: launched, of all ranks
    drafts_max: int = 0  #: tokens that are proposed after each step
    contexts: int = 1  #: ranks that have a part of the tokens each
    layout: str = "LBHNC"  #: of KV caches
    blocks_per_chunk: int = 0  #: 0: nobody counts what is in a slot
    slot_watch: SlotWatch = field(default_factory=SlotWatch)
    has_failed: bool = False  #: what was launched since is of no use


@dataclass
class _Running:
    """One request in the persistent batch."""

    name: str
    prefix: Prefix
    tables: list[list[int]]  #: block ids of each group
    drafts: list[int] = field(default_factory=list)  #: what may follow, not computed yet
    state: int | None = None  #: the place in a Mamba group's table where its state is, if known

    def tables_now(self) -> list[list[int]]:
        """Return the block ids as a step that is launched now has them."""
        return [list(table) for table in self.tables]


@dataclass(frozen=True)
class _Layer:
    """One layer's pages: (blocks, heads, tokens of a block, words), where the device has them."""

    name: str
    pages: Any
    salts: NDArray[np.uint64]

    def words(self, digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
        _, heads, _, words = self.pages.shape
        return written(digests, self.salts).reshape(len(digests), heads, words)


class Runner:
    """One rank's persistent batch and its KV caches."""

    def __init__(
        self,
        config: Any,
        kv_caches: Mapping[str, torch.Tensor],
        device: Device,
        world: World,
        rank: int,
    ) -> None:
        self._device = device
        self._world = world
        self._requests: dict[str, _Running] = {}
        self._context = rank % world.contexts
        self._config = config
        self._groups = [
            (
                spec,
                [
                    _layer(each, spec, device.pages(kv_caches[each]), rank)
                    for each in group.layer_names
                ],
            )
            for group in config.kv_cache_groups
            # All of a group are alike here; vLLM wraps them where groups differ in their pages.
            for spec in [next(iter(iter_layer_specs(group.kv_cache_spec)))]
        ]
        for number, (spec, layers) in enumerate(self._groups):
            words = (
                len(layers) * own_bytes(spec, world.layout) // WORD_BYTES * world.blocks_per_chunk
            )
            if words:
                world.slot_watch.words_of[number] += words

    # --- a step, on the host ---

    def step(self, scheduled: SchedulerOutput, connector: Any) -> tuple[int, ModelRunnerOutput]:
        """Launch a step. Returns what to synchronize with before its output is read."""
        meta = scheduled.kv_connector_metadata
        connector.handle_preemptions(meta)
        self._update(scheduled)
        self._prepare_blocks(scheduled)
        connector.bind_connector_metadata(meta)
        if scheduled.has_sync_kv_loads:
            connector.start_load_kv(None)
        output = self._launch(scheduled)
        launched = self._device.launched
        if not scheduled.has_sync_kv_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        self._device.move()
        output.kv_connector_output = _connector_output(connector, scheduled.finished_req_ids)
        connector.clear_connector_metadata()
        return launched, output

    def _update(self, scheduled: SchedulerOutput) -> None:
        for name in scheduled.finished_req_ids:
            self._requests.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids or ())
            self._start(new.req_id, tokens, new.block_ids)
        cached = scheduled.scheduled_cached_reqs
        for number, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[number]
            if name in cached.resumed_req_ids:
                # A new one: a step in flight may still write to what it was.
                self._start(name, list(cached.all_token_ids[name]), blocks)
            elif blocks is not None:
                for table, more in zip(self._requests[name].tables, blocks, strict=True):
                    table.extend(more)

    def _start(self, name: str, tokens: list[int], blocks: Any) -> None:
        prefix = Prefix(tokens, self._world.weights, self._world.asked.get(name, Asked()))
        self._requests[name] = _Running(name, prefix, [list(table) for table in blocks])

    def _prepare_blocks(self, scheduled: SchedulerOutput) -> None:
        """Zero and copy blocks: before loads that the step itself reads, and before the model."""
        zeroed = list(scheduled.new_block_ids_to_zero or ())
        copies = list(scheduled.kv_cache_block_copies or ())
        if copies:
            self._refuse_early_copies(scheduled, copies)

        def run() -> None:
            self._zero(zeroed)
            for copy in copies:
                self._copy_block(copy.src_block_id, copy.dst_block_id)

        if zeroed or copies:
            self._device.launch(run)

    def _refuse_early_copies(self, scheduled: SchedulerOutput, copies: list[Any]) -> None:
        """Raise ``CopiedTooEarly`` if what is to be copied is computed in this step.

        Looks at groups that keep all tokens: tables of others go on naming blocks that were freed.
        """
        computed = _computed(scheduled)
        for number, (spec, _) in enumerate(self._groups):
            if isinstance(spec, MambaSpec | SlidingWindowSpec):
                continue
            tables = {name: self._requests[name].tables[number] for name in computed}
            for copy in copies:
                users = [name for name in computed if copy.dst_block_id in tables[name]]
                wanted = max([computed[name] for name in users], default=0)
                for name, count in scheduled.num_scheduled_tokens.items():
                    start = computed[name]
                    tokens, blocks, _ = self._places(spec, tables[name], start, start + count)
                    if (tokens[blocks == copy.src_block_id] < wanted).any():
                        raise CopiedTooEarly(f"{copy}, for {wanted} tokens of {users}")

    def _launch(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        computed = _computed(scheduled)
        batch = [
            (
                self._requests[name],
                self._requests[name].tables_now(),
                computed[name],
                count,
                scheduled.scheduled_spec_decode_tokens.get(name, []),
            )
            for name, count in scheduled.num_scheduled_tokens.items()
        ]
        sampled: list[list[int]] = [[] for _ in batch]

        def run() -> None:
            if self._world.has_failed:
                return
            for number, (request, tables, start, count, scheduled_drafts) in enumerate(batch):
                prefix = request.prefix
                # Scheduling ahead, vLLM takes all drafts for right, and does not name the next.
                first = min(start, len(prefix.tokens) - 1)
                drafts = request.drafts if -1 in scheduled_drafts else scheduled_drafts
                drafts = [*drafts, *scheduled_drafts][: len(scheduled_drafts)]
                end = first + count
                self._read(request, tables, first)
                if not drafts:
                    self._write_checkpoint(prefix, tables, first, end)
                self._write(prefix.drafted(drafts), tables, first, end, len(drafts))
                if end == len(prefix.tokens) + len(drafts):
                    sampled[number] += prefix.sample(drafts)
                    request.drafts = prefix.propose(self._world.drafts_max)
                # Of what a part of a prompt is followed by, nothing is kept.
                wrong = len(drafts) + 1 - len(sampled[number]) if sampled[number] else 0
                self._keep_state(request, tables, end, len(drafts), wrong)

        self._device.launch(run)
        self._world.steps_computed += bool(batch)
        names = [request.name for request, *_ in batch]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def drafts(self) -> DraftTokenIds:
        """Return what may follow in each request."""
        running = {name: request.drafts for name, request in self._requests.items()}
        return DraftTokenIds([*running], [[*each] for each in running.values()])

    # --- the model, on the device ---

    def _read(self, request: _Running, tables: list[list[int]], end: int) -> None:
        """Compare all that attention reads to compute the token ``end``."""
        if end == 0:
            return
        digests = request.prefix.digests(end)
        for (spec, layers), table in zip(self._groups, tables, strict=True):
            start = 0
            if isinstance(spec, SlidingWindowSpec):
                start = max(0, end - spec.sliding_window + 1)
            if isinstance(spec, MambaSpec):
                known = request.state
                place = _state_place(spec, end) if known is None else known
                places = _state_places(table, end - 1, place, 1)
            else:
                places = self._places(spec, table, start, end)
            for layer in layers:
                self._compare(request, layer, places, digests[places[0]])

    def _compare(
        self,
        request: _Running,
        layer: _Layer,
        places: _Places,
        digests: NDArray[np.uint64],
    ) -> None:
        tokens, blocks, offsets = places
        if not len(tokens):
            return
        put = self._device.put
        found = layer.pages[put(blocks), :, put(offsets)]
        self._world.tokens_checked += len(tokens)

        def refuse(wrong: NDArray[np.bool_]) -> None:
            if self._world.has_failed:
                return
            self._world.has_failed = True
            first = int(np.argmax(wrong))
            raise WrongKV(
                f"request {request.name!r}, layer {layer.name}: the KV of {int(wrong.sum())} of "
                f"{len(tokens)} tokens is not theirs, first that of token {tokens[first]}, in "
                f"block {blocks[first]}; weights {weights}"
            )

        weights = self._world.weights
        wrong = (found != put(layer.words(digests))).any(axis=(1, 2))
        self._device.look(wrong, refuse)

    def _write(
        self, prefix: Prefix, tables: list[list[int]], start: int, end: int, drafts: int
    ) -> None:
        """Write the KV of the tokens up to ``end``, of which the last ones are drafts."""
        digests = prefix.digests(end)
        for (spec, layers), table in zip(self._groups, tables, strict=True):
            if isinstance(spec, MambaSpec):  # a state before all drafts, and one behind each
                place = _state_place(spec, end)
                places = _state_places(table, end - 1 - drafts, place, drafts + 1)
            else:
                places = self._places(spec, table, start, end)
            self._write_places(layers, places, digests)

    def _write_checkpoint(
        self, prefix: Prefix, tables: list[list[int]], start: int, end: int
    ) -> None:
        """Write the Mamba state from within a part of a prompt for which vLLM has a block."""
        for (spec, layers), table in zip(self._groups, tables, strict=True):
            if not isinstance(spec, MambaSpec) or not spec.num_prefill_checkpoint_blocks:
                continue
            (offset,), (place,) = compute_mamba_prefill_checkpoints(
                [end],
                [end - start],
                hash_block_size=self._config.hash_block_size,
                mamba_block_size=spec.block_size,
                checkpoint_alignment=spec.prefill_checkpoint_alignment,
                drop_eagle_block=False,
                cache_hit_alignment_tokens=self._config.cache_hit_alignment_tokens,
            )
            if offset and table[place]:  # block 0 is none
                token = start + offset - 1
                places = _state_places(table, token, place, 1)
                self._write_places(layers, places, prefix.digests(end))

    def _write_places(
        self, layers: list[_Layer], places: _Places, digests: NDArray[np.uint64]
    ) -> None:
        put = self._device.put
        tokens, blocks, offsets = places
        for layer in layers:
            layer.pages[put(blocks), :, put(offsets)] = put(layer.words(digests[tokens]))

    def _keep_state(
        self, request: _Running, tables: list[list[int]], end: int, drafts: int, wrong: int
    ) -> None:
        """Note where the state behind the last right token is, as vLLM's runner does.

        One that ends a block is copied to where vLLM's cache and the connector look for it.
        """
        before_drafts, right = end - drafts, end - wrong
        for (spec, _), table in zip(self._groups, tables, strict=True):
            if not isinstance(spec, MambaSpec):
                continue
            place = _state_place(spec, end)
            request.state = place + right - before_drafts
            full = right // spec.block_size * spec.block_size
            if full < before_drafts:
                continue
            target = _state_place(spec, full)
            source = place + full - before_drafts
            if source != target:
                self._copy_block(table[source], table[target])
            if target == place:
                request.state = place

    def _places(self, spec: Any, table: list[int], start: int, end: int) -> _Places:
        """Return those tokens that this rank has, and where each one's KV is: block, and place."""
        contexts = self._world.contexts
        tokens = np.arange(start, end)
        tokens = tokens[tokens % contexts == self._context]  # vLLM deals them out one by one
        blocks = np.array(table, dtype=np.int64)[tokens // (spec.block_size * contexts)]
        return tokens, blocks, tokens // contexts % spec.block_size

    def _zero(self, blocks: list[int]) -> None:
        for block in blocks:
            for _, layers in self._groups:
                for layer in layers:
                    layer.pages[block] = 0

    def _copy_block(self, source: int, target: int) -> None:
        for _, layers in self._groups:
            for layer in layers:
                layer.pages[target] = layer.pages[source]


def _state_place(spec: MambaSpec, end: int) -> int:
    """Return the place in the table where a step up to ``end`` begins to write its states."""
    return int((end - 1) // spec.block_size)


def _state_places(table: list[int], first: int, place: int, count: int) -> _Places:
    """Return tokens whose states lie in one place of the table after the other."""
    blocks = np.array(table[place : place + count], dtype=np.int64)
    return np.arange(first, first + count), blocks, np.zeros(count, dtype=np.int64)


def _computed(scheduled: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens of each request were computed before this step."""
    cached = scheduled.scheduled_cached_reqs
    return {each.req_id: each.num_computed_tokens for each in scheduled.scheduled_new_reqs} | dict(
        zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    )


def _layer(name: str, spec: KVCacheSpec, pages: Any, rank: int) -> _Layer:
    """Return a layer, whose words depend on what its pages mean, beside their size."""
    heads, words = pages.shape[1], pages.shape[3]
    salts = salts_of(name, rank * heads * words, heads * words)
    if isinstance(spec, MambaSpec):  # with more drafts a state begins elsewhere in its page
        salts = salts ^ np.uint64(2 * spec.num_speculative_blocks + is_conv_state_dim_first())
    return _Layer(name, pages, salts)


def _connector_output(connector: Any, finished: set[str]) -> KVConnectorOutput:
    output = KVConnectorOutput()
    results = connector.get_transfer_results(finished)
    output.finished_sending = results.finished_sending
    output.finished_recving = results.finished_recving
    output.failed_recving = results.failed_recving
    output.invalid_block_ids = connector.get_block_ids_with_load_errors()
    output.kv_connector_stats = connector.get_kv_connector_stats()
    output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
    output.kv_connector_worker_meta = connector.build_connector_worker_meta()
    return output
