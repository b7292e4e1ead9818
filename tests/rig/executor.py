"""vLLM's executor, with a worker for each rank in this thread: no model, no process.

vLLM's own ``EngineCore`` drives it. A worker has what one rank of an engine has of KV:
the tensors that vLLM lays out, vLLM's connector in its worker's role, and kvtier's
worker, whose copies a ``Device`` makes late.
"""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.utils import allocate_kv_cache

from tests.rig.runner import Runner, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import ModelRunnerOutput

    from tests.rig.device import Device

MEMORY_BYTES = 1 << 30  #: far more than a scenario may use: its shape says how many blocks


class RigWorker:
    """One rank."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        rank: int,
        specs: dict[str, KVCacheSpec],
        device: Device,
        world: World,
    ) -> None:
        self._config = vllm_config
        self._rank = rank
        self._specs = specs
        self._world = world
        # What samples of the weights are taken of.
        self._model = torch.nn.Linear(8, 8)
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config
        self.speculative_config = None
        self.device = device
        self._sampled: tuple[int, ModelRunnerOutput] | None = None

    # --- what vLLM asks of a worker ---

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self._specs

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [self._world.layout]

    def set_kv_cache_layout(self, layout: str, *_: Any) -> None:
        self._config.cache_config.kv_cache_layout = layout

    def determine_available_memory(self) -> int:
        return MEMORY_BYTES

    def initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        config = configs[self._rank]
        layout = self._config.cache_config.get_resolved_kv_cache_layout()
        caches = allocate_kv_cache(config, self.device.place, layout)
        self._runner = Runner(config, caches, self.device, self._world, self._rank)
        with set_current_vllm_config(self._config):
            self.connector: Any = KVConnectorFactory.create_connector(
                config=self._config, role=KVConnectorRole.WORKER, kv_cache_config=config
            )
            self.connector.register_kv_caches(caches)
        side = self.connector.connector_worker
        side.worker = self.device.late(side.worker, self._world.slot_watch)

    def execute_model(self, scheduled: SchedulerOutput) -> Callable[[], Any]:
        launched, output = self._runner.step(scheduled, self.connector)
        if scheduled.total_num_scheduled_tokens:
            self._sampled = launched, output
            return lambda: None
        return lambda: output

    def sample_tokens(self, _grammar: Any) -> Callable[[], Any]:
        assert self._sampled is not None
        launched, output = self._sampled

        def read() -> ModelRunnerOutput:
            self.device.synchronize(launched)
            return output

        return read

    def take_draft_token_ids(self) -> Any:
        return self._runner.drafts()

    def get_model(self) -> torch.nn.Module:
        self._model.weight.data.fill_(self._world.weights)
        return self._model

    def update_weights(self, weights: int) -> None:
        self._world.weights = weights

    def synchronize_device(self) -> None:
        self.device.synchronize()

    def shutdown(self) -> None:
        self.device.drain()
        self.connector.shutdown()


class _Result(Future[Any]):
    """What a step gave, read when vLLM waits for it."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self._read = read

    def result(self, timeout: float | None = None) -> Any:
        del timeout
        return self._read()


class RigExecutor(Executor):
    """Runs all ranks, one after the other."""

    specs: list[dict[str, KVCacheSpec]]
    devices: list[Device]
    world: World

    def _init_executor(self) -> None:
        self.workers = []
        for rank, (specs, device) in enumerate(zip(self.specs, self.devices, strict=True)):
            config = copy.copy(self.vllm_config)
            config.parallel_config = copy.copy(config.parallel_config)
            config.parallel_config.rank = rank
            worker = RigWorker(config, rank, specs, device, self.world)
            self.workers.append(worker)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a method of all workers that have it, or a function of each worker."""
        del timeout, non_block
        if not isinstance(method, str):
            return [method(worker, *args, **(kwargs or {})) for worker in self.workers]
        has_it = [worker for worker in self.workers if hasattr(worker, method)]
        return [getattr(worker, method)(*args, **(kwargs or {})) for worker in has_it]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Launch a step."""
        return self._gather("execute_model", scheduler_output, non_block=non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return what the step launched last has sampled."""
        return self._gather("sample_tokens", grammar_output, non_block=non_block)

    def _gather(self, method: str, argument: Any, *, non_block: bool) -> Any:
        if len(self.workers) == 1:
            reads = self.collective_rpc(method, args=(argument,))
        else:
            # Each rank's process gets its own: vLLM's connector takes jobs out of what it gets.
            sent = pickle.dumps(argument)
            reads = [getattr(each, method)(pickle.loads(sent)) for each in self.workers]

        def read() -> ModelRunnerOutput | None:
            outputs = [each() for each in reads]
            if len(outputs) == 1 or outputs[0] is None:
                return outputs[0]
            assert self.kv_output_aggregator is not None
            return self.kv_output_aggregator.aggregate(outputs)

        return _Result(read) if non_block else read()

    def check_health(self) -> None:
        """Return: it is well."""
