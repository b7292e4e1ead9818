"""Mistakes that a worker on a CUDA device could make, and the rig must find there."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from vllm.v1.kv_offload.base import TransferResult
from vllm.v1.kv_offload.cpu.gpu_worker import (
    CPUOffloadingWorker,
    SingleDirectionOffloadingHandler,
)

from tests.rig import cuda_device
from tests.rig.runner import WrongKV
from tests.rig.scenario import play

if TYPE_CHECKING:
    from collections.abc import Callable

FOUND_WITHIN = 300  #: scenarios, by far
#: Of the device's clock, some 10 ms: a copy is still under way when a worker that does not ask
#: has been believed. (An H100 had copied by then in all but one of 150 scenarios with a tenth.)
LATE_CYCLES_MAX = 20_000_000


def load_from_another_slot() -> Any:
    """Copy the first block of each load from the slot beside the one it is in."""
    real = CPUOffloadingWorker.submit_load

    def submit_load(self: Any, job_id: int, src_spec: Any, *rest: Any, **named: Any) -> bool:
        wrong = copy.copy(src_spec)
        wrong.block_ids = src_spec.block_ids.copy()
        wrong.block_ids[:1] = (wrong.block_ids[:1] + 1) % self._mmap_region.num_chunks
        loaded: bool = real(self, job_id, wrong, *rest, **named)
        return loaded

    return patch.object(CPUOffloadingWorker, "submit_load", submit_load)


def report_before_the_copy() -> Any:
    """Report a copy once it is queued, and don't ask its event."""
    real = SingleDirectionOffloadingHandler.get_finished

    def get_finished(self: Any) -> list[Any]:
        told = self.__dict__.setdefault("told", set())
        under_way = [
            TransferResult(each.job_id, True, each.num_bytes, 1.0) for each in self._transfers
        ]
        real(self)
        early = [each for each in under_way if each.job_id not in told]
        told.update(each.job_id for each in early)
        return early

    return patch.object(SingleDirectionOffloadingHandler, "get_finished", get_finished)


MISTAKES: dict[str, Callable[[], Any]] = {
    each.__name__: each for each in (load_from_another_slot, report_before_the_copy)
}


def scenarios_until_found(plant: Callable[[], Any]) -> int:
    """Return the first scenario that finds a mistake. Raises if none of many does."""
    with plant(), patch.object(cuda_device, "LATE_CYCLES_MAX", LATE_CYCLES_MAX):
        for seed in range(FOUND_WITHIN):
            try:
                play(seed)
            except WrongKV:
                return seed
    raise AssertionError(f"{plant.__name__} is not found in {FOUND_WITHIN} scenarios")
