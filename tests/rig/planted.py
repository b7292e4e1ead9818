"""Mistakes that the rig must find: each is one function in another's place."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from kvtier.core.generations import Generations
from kvtier.vllm import cpu_worker
from tests.rig.device import LateWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def load_from_another_slot() -> Any:
    """Copy the first block of each load from the slot beside the one it is in."""
    real = cpu_worker._load

    def load(route: Any, plan: Any) -> int:
        slots = np.array(plan.slots)
        slots[:1] = (slots[:1] + 1) % route.host.shape[0]
        return real(route, cpu_worker._Plan(plan.routes, plan.blocks, slots, plan.sub_blocks))

    return patch.object(cpu_worker, "_load", load)


@contextmanager
def report_before_the_copy() -> Iterator[None]:
    """Report a copy once it is queued, and copy later: as a worker does that asks no event."""
    real_finished = LateWorker.get_finished

    def submit(kind: str) -> Any:
        def submit_later(self: Any, job_id: int, src: Any, dst: Any, *_: Any) -> bool:
            def copy() -> None:
                getattr(self.real, kind)(job_id, src, dst)
                self.real.get_finished()

            self._device.copy(kind.removeprefix("submit_"), job_id, copy)
            self.__dict__.setdefault("reported", []).append(job_id)
            return True

        return submit_later

    def get_finished(self: Any) -> list[Any]:
        real_finished(self)
        reported, self.reported = self.__dict__.get("reported", []), []
        return [_result(job) for job in reported]

    with (
        patch.object(LateWorker, "submit_store", submit("submit_store")),
        patch.object(LateWorker, "submit_load", submit("submit_load")),
        patch.object(LateWorker, "get_finished", get_finished),
    ):
        yield


def _result(job: int) -> Any:
    return cpu_worker.TransferResult(job, True, 1, 0.0)


def find_what_older_weights_computed() -> Any:
    """A reset empties the primary tier, and tiers serve what they have."""
    return patch.object(Generations, "begin", lambda *_: None)


MISTAKES: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        load_from_another_slot,
        report_before_the_copy,
        find_what_older_weights_computed,
    )
}
