"""A CUDA device in the rig: its own streams and events, and vLLM's own worker.

Nothing is put in order here that vLLM does not put in order: what is launched goes to
the current stream, vLLM's worker copies on streams of its own. But each of them is made
late by a kernel that does nothing for a while, drawn from the seed, so that what is not
waited for is seen to be missing. A seed draws the same scenario again, though not the
same moments.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.kv_offload.cpu.gpu_worker import (
    CPUOffloadingWorker,
    SingleDirectionOffloadingHandler,
)

from tests.rig.device import Device

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from numpy.typing import NDArray
    from vllm.v1.kv_offload.base import OffloadingWorker

    from tests.rig.slot_watch import SlotWatch

LATE_CYCLES_MAX = 2_000_000  #: of the device's clock, about a millisecond


@dataclass
class _Look:
    """What a check has found, once the device has brought it to the host."""

    wrong: torch.Tensor
    refuse: Callable[[NDArray[Any]], None]


@dataclass
class _Launch:
    """Work on the compute stream, with the checks in it."""

    number: int
    done: torch.cuda.Event
    looks: list[_Look] = field(default_factory=list)


class CudaDevice(Device):
    """The current CUDA device. ``laziness``: how often something is late."""

    place = torch.device("cuda")
    engines = 0  #: of this process
    engines_pinned = 0  #: whose region vLLM has pinned
    engines_with_kernel = 0  #: whose loads vLLM's Triton kernel may copy, from pinned memory

    def __init__(self, rng: random.Random, laziness: float) -> None:
        super().__init__(rng, laziness)
        self._launches: deque[_Launch] = deque()
        self._looks: list[_Look] = []

    # --- memory ---

    def pages(self, cache: torch.Tensor) -> Any:
        return cache.view(torch.int64)

    def put(self, values: NDArray[Any]) -> Any:
        host = torch.from_numpy(np.ascontiguousarray(values).view(np.int64))
        # From pageable memory, the host would wait for the stream.
        return host.pin_memory().to(self.place, non_blocking=True)

    def look(self, wrong: Any, refuse: Callable[[NDArray[Any]], None]) -> None:
        told = torch.empty(wrong.shape, dtype=torch.bool, pin_memory=True)
        told.copy_(wrong, non_blocking=True)
        self._looks.append(_Look(told, refuse))

    def late(self, worker: OffloadingWorker, watch: SlotWatch) -> OffloadingWorker:
        """Return vLLM's worker; its copies begin late, on the streams that it has chosen.

        ``watch`` sees none: nobody knows at which moment the device copies.
        """
        del watch
        assert type(worker) is CPUOffloadingWorker
        handlers = [
            each
            for each in vars(worker).values()
            if isinstance(each, SingleDirectionOffloadingHandler)
        ]
        assert len(handlers) >= 2
        CudaDevice.engines += 1
        CudaDevice.engines_pinned += bool(worker._mmap_region.is_pinned)
        CudaDevice.engines_with_kernel += any(
            isinstance(each._swap_blocks_batch, partial) for each in handlers
        )
        for handler in handlers:
            self._make_late(handler)
        return worker

    def _make_late(self, handler: Any) -> None:
        copy, kind = handler._swap_blocks_batch, "store" if handler.gpu_to_cpu else "load"

        def copy_late(*arguments: Any, **options: Any) -> None:
            self._linger()
            copy(*arguments, **options)
            self.copied[kind] += 1

        handler._swap_blocks_batch = copy_late

    def _linger(self) -> None:
        """Have the current stream do nothing for a while, or not."""
        if self._rng.random() < self._laziness:
            torch.cuda._sleep(self._rng.randrange(LATE_CYCLES_MAX))

    # --- streams ---

    def launch(self, run: Callable[[], None]) -> int:
        """Queue work on the current stream; ``run`` itself only queues."""
        self._linger()
        run()
        self.launched += 1
        done = torch.cuda.Event()
        done.record()
        self._launches.append(_Launch(self.launched, done, self._looks))
        self._looks = []
        return self.launched

    def synchronize(self, launched: int | None = None) -> None:
        """Wait for the current stream: for so many launches, or all. Raises what checks found."""
        end = self.launched if launched is None else launched
        while self._launches and self._launches[0].number <= end:
            launch = self._launches.popleft()
            launch.done.synchronize()
            for look in launch.looks:
                if look.wrong.any():
                    look.refuse(look.wrong.numpy())

    def move(self) -> None:
        """Leave it to itself."""

    def drain(self) -> None:
        """Wait for the current stream. vLLM's worker waits for its own when it is shut down."""
        self.synchronize()
