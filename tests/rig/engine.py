"""An engine: vLLM's own core and scheduler, kvtier behind vLLM's connector, and no model."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from vllm import envs
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.platforms import current_platform
from vllm.v1.engine import core as core_module
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from kvtier.vllm.memory.region_header import HEADER_BYTES
from tests.rig.device import Device
from tests.rig.executor import RigExecutor
from tests.rig.layers import BLOCK_TOKENS, PAGE_BYTES, layers
from tests.rig.listening import Listener
from tests.rig.runner import World
from tests.rig.stepped_tiers import stepped_tiers

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from tests.rig.shape import Shape
    from tests.rig.stepped_tiers import SteppedTiers

MODEL_TOKENS_MAX = 64
STANDSTILL_STEPS = 100  #: that compute nothing: more than what a load may take
#: Of devices and tiers in a step that computes nothing: most would wait. In the tenth of a row
#: all that is quick is over, and what is left is a deadline.
MOVES_WHILE_IDLE = (3,) * 10 + (20,)
ENDINGS = (AssertionError, KeyError, ValueError)  #: by which vLLM or kvtier would end an engine
ROW_BYTES = 4096  #: vLLM rounds a slot up to pages of memory
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": MODEL_TOKENS_MAX,
    "vocab_size": 512,
}


class EngineEnded(Exception):
    """Raised when vLLM or kvtier has failed an assertion of its own, or found no entry or block."""


class Engine:
    """A running engine, and what a scenario looks at."""

    def __init__(self, core: EngineCore, world: World, tiers: SteppedTiers, shape: Shape) -> None:
        self.core = core
        self._steps_idle = 0
        self.scheduler: Any = core.scheduler
        self.workers: Any = core.model_executor.workers
        self.world = world
        self.tiers = tiers
        self.manager: Any = self.scheduler.connector.connector_scheduler.manager
        self.facade: Any = self.manager.facade
        world.slot_watch.slots = self.facade._primary.slots
        self.listener = Listener(shape, self.scheduler) if shape.events else None

    def step(self) -> Any:
        """Run one step of the engine, and let the devices and tiers go on meanwhile, or not.

        Returns what vLLM's front end would get.
        """
        before = self.world.steps_computed
        try:
            outputs, _ = self.core.step_fn()
        except ENDINGS as error:
            if type(error) in ENDINGS:  # and none of the rig's own
                raise EngineEnded(f"{error!r} would have ended the engine") from error
            raise
        computed = self.world.steps_computed > before
        self._steps_idle = 0 if computed else self._steps_idle + 1
        if self._steps_idle > STANDSTILL_STEPS:
            self._end_standstill()
        for _ in range(1 if computed else MOVES_WHILE_IDLE[min(self._steps_idle, 10)]):
            for worker in self.workers:
                worker.device.move()
            self.tiers.move()
            self.world.slot_watch.tiers_work()
        return outputs

    def _end_standstill(self) -> None:
        """Abort one of several requests that have loaded and wait for each other's GPU blocks.

        vLLM finds no way out of that, and kvtier has no part in it: it has nothing to do.
        """
        holding = list(self.scheduler.kv_holding_waiting)
        if len(holding) > 1 and not self.jobs() and not self.facade.has_pending_work():
            self.core.abort_requests([holding[0].request_id])

    def knows_request(self, name: str) -> bool:
        """Tell whether vLLM's scheduler, or its connector, still has a request of this id."""
        connector = self.scheduler.connector.connector_scheduler
        return name in self.scheduler.requests or name in connector._req_status

    def jobs(self) -> list[Any]:
        """Return the loads and stores that vLLM's connector has under way."""
        return list(self.scheduler.connector.connector_scheduler._jobs.values())

    def told(self) -> dict[str, str]:
        """Return what each request waits for, for people."""
        return {
            name: f"{each.status.name}, {each.num_computed_tokens} of {each.num_tokens} tokens"
            for name, each in self.scheduler.requests.items()
        }

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for blocks that are being loaded."""
        loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        requests = self.scheduler.requests.values()
        return any(each.status is loading or each.is_finished() for each in requests)

    @property
    def computes(self) -> bool:
        """Whether the model works at a step whose output vLLM has not read."""
        queue = self.core.batch_queue or ()
        return any(scheduled.total_num_scheduled_tokens for _, scheduled, _ in queue)

    @property
    def may_be_reset(self) -> bool:
        """Whether vLLM's connector takes a reset now: not a second one in a step."""
        connector = self.scheduler.connector.connector_scheduler
        return not connector._current_batch_jobs_to_flush

    @property
    def has_work(self) -> bool:
        """Whether vLLM would call the engine again."""
        return bool(self.scheduler.has_requests() or self.core.batch_queue)


@contextmanager
def engine(shape: Shape, rng: random.Random, folder: Path) -> Iterator[Engine]:
    """Start an engine and shut it down. ``folder``: where tiers keep their files."""
    world = World(
        drafts_max=shape.speculates,
        contexts=shape.contexts,
        layout=shape.layout,
        # The stages of a pipeline may have other layers each: rows go to tiers as they are.
        blocks_per_chunk=shape.blocks_per_chunk if shape.stages == 1 else 0,
    )
    executor: Any = type(
        "Executor",
        (RigExecutor,),
        {
            "specs": [
                layers(
                    shape.kinds,
                    shape.layers_each,
                    shape.ranks,
                    stage,
                    drafts=shape.speculates,
                    checkpoints=int(shape.checkpoints),
                )
                for stage in range(shape.stages)
                for _ in range(shape.ranks)
            ],
            "devices": [_device(rng, shape.laziness) for _ in range(shape.ranks * shape.stages)],
            "world": world,
        },
    )
    with ExitStack() as stack:
        tiers = stack.enter_context(stepped_tiers(rng, shape.tier_laziness, world.slot_watch))
        stack.enter_context(_drafts(shape.drafts))
        stack.enter_context(_layout_of_states("DS" if shape.columns else "SD"))
        # It takes as long as a whole scenario.
        stack.enter_context(patch("vllm.v1.engine.core.freeze_gc_heap"))
        core = EngineCore(vllm_config(shape, folder), executor, log_stats=True)
        try:
            yield Engine(core, world, tiers, shape)
        except BaseException:
            world.has_failed = True
            world.slot_watch.slots = None
            raise
        finally:
            try:
                core.model_executor.shutdown()
            finally:
                core.scheduler.shutdown()


@contextmanager
def _drafts(numbers: Sequence[int]) -> Iterator[None]:
    """Have vLLM take these KV-cache groups for those of a draft model, which the rig has not."""
    real = core_module.get_kv_cache_configs

    def configs(*arguments: Any, **named: Any) -> Any:
        made = real(*arguments, **named)
        for config in made:
            for number, group in enumerate(config.kv_cache_groups):
                group.is_eagle_group = number in numbers  # a focus may leave fewer groups
        return made

    with patch.object(core_module, "get_kv_cache_configs", configs):
        yield


@contextmanager
def _layout_of_states(layout: str) -> Iterator[None]:
    """Have vLLM keep states of convolutions in this layout, which it looks up once a process."""
    get_conv_state_layout.cache_clear()
    # It has looked up its variables, too, once the first engine has started.
    with patch.object(envs, "VLLM_SSM_CONV_STATE_LAYOUT", layout, create=True):
        try:
            yield
        finally:
            get_conv_state_layout.cache_clear()


def vllm_config(shape: Shape, folder: Path) -> VllmConfig:
    """Build what a user's options would become."""
    row_bytes = PAGE_BYTES * shape.layers_each * shape.stages * shape.blocks_per_chunk
    row = -(-row_bytes // ROW_BYTES) * ROW_BYTES
    extra = {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": (shape.slots + _header_rows(row)) * row,
        "blocks_per_chunk": shape.blocks_per_chunk,
        "eviction_policy": shape.eviction_policy,
        "load_policy": "auto" if shape.decides else "always",
        "canonical_layout": shape.canonical,
        "on_reset": "keep" if shape.keeps and not shape.updates else "new_generation",
        "offload_prompt_only": shape.prompts_only,
        "self_describing_kv_events": shape.events,
        "weights_version": "0",  # there are no files by which the next life could know them
        "secondary_tiers": [
            _placed(tier, folder / str(number)) | {"enable_kv_events": shape.events}
            for number, tier in enumerate(shape.tiers)
        ],
        **dict(shape.options),
    }
    parallel = ParallelConfig(
        tensor_parallel_size=shape.ranks,
        pipeline_parallel_size=shape.stages,
        decode_context_parallel_size=shape.contexts,
        distributed_executor_backend="uni" if shape.ranks * shape.stages == 1 else "mp",
    )
    # vLLM wants fewer heads than ranks where it deals the tokens out.
    model = _model(1 if shape.contexts > 1 else 2)
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(
            block_size=BLOCK_TOKENS,
            enable_prefix_caching=shape.caches,
            num_gpu_blocks_override=_blocks_least(shape) + shape.gpu_blocks,
            mamba_cache_mode="align" if "mamba" in shape.kinds else "none",
            # It is of windows and states, and refused where there are none.
            prefix_cache_retention_interval=shape.retention if _has_ends(shape.kinds) else 0,
            # vLLM wants none with one group, and a focus may leave no more.
            prefix_match_unit=shape.unit if len(shape.kinds) > 1 else None,
        ),
        scheduler_config=SchedulerConfig(
            policy="fcfs" if shape.priorities == 1 else "priority",
            max_num_seqs=shape.running_max,
            max_num_batched_tokens=shape.batched_tokens_max,
            max_model_len=MODEL_TOKENS_MAX,
            is_encoder_decoder=False,
            enable_chunked_prefill=shape.chunks is not None,
            long_prefill_token_threshold=shape.chunks or 0,
        ),
        parallel_config=parallel,
        speculative_config=_speculation(shape, model, parallel),
        device_config=DeviceConfig(device=current_platform.device_type),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=shape.events, publisher="null"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
    )
    # vLLM has no asynchronous scheduling on the CPU; its scheduler and core do not know that.
    config.scheduler_config.async_scheduling = shape.asynchronous
    return config


def _speculation(
    shape: Shape, model: ModelConfig, parallel: ParallelConfig
) -> SpeculativeConfig | None:
    """Return vLLM's configuration of drafts. The rig's own runner proposes them."""
    if not shape.speculates:
        return None
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=shape.speculates,
        prompt_lookup_min=1,
        prompt_lookup_max=1,
        target_model_config=model,
        target_parallel_config=parallel,
    )


def _has_ends(kinds: Sequence[str]) -> bool:
    """Tell whether a group needs only the end of a prefix."""
    return any(kind == "mamba" or ":" in kind for kind in kinds)


def _device(rng: random.Random, laziness: float) -> Device:
    if current_platform.is_cpu():
        return Device(rng, laziness)
    from tests.rig.cuda_device import CudaDevice

    return CudaDevice(rng, laziness)


def _header_rows(row: int) -> int:
    """Return how many rows of vLLM's own region kvtier takes for its header."""
    return 0 if current_platform.is_cpu() else -(-HEADER_BYTES // row)


def _placed(tier: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a tier's options with the folder that it keeps its files in, if it has any."""
    if tier["type"] == "fs":
        return {**tier, "root_dir": str(folder)}
    return {**tier, "path": str(folder)} if tier["type"] == "disk" else dict(tier)


def _blocks_least(shape: Shape) -> int:
    """Return how many blocks one request of full length may need, and the null block."""
    needed = 1
    for kind in shape.kinds:
        tokens = MODEL_TOKENS_MAX
        window = kind.partition(":")[2]
        if window:
            in_flight = shape.batched_tokens_max * (shape.stages + shape.asynchronous)
            tokens = min(tokens, int(window) - 1 + in_flight)
        states = 4 + shape.speculates + shape.checkpoints
        needed += states if kind == "mamba" else -(-tokens // BLOCK_TOKENS) + 1
    return needed


@cache
def _model(heads: int) -> ModelConfig:
    """Return the model's configuration. ``heads``: of keys and values."""
    # Else vLLM looks at the class in a process of its own, where nothing stands in for the
    # compiled parts that may be missing here.
    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps({**_MODEL, "num_key_value_heads": heads})
        )
        config = ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype="float16",
            max_model_len=MODEL_TOKENS_MAX,
            enforce_eager=True,
        )
    config.model = "rig/model"
    return config
