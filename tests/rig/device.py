"""A device as CUDA has one: what is launched runs later, each stream in its own order.

The model runs on the compute stream. Copies to the host have a stream, copies from
the host another; a copy waits for all that was launched on the compute stream
before it, and for the copy before it in its own stream. When else it runs is drawn
from the seed: at once, or steps later, or not before somebody waits for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tests.rig.slot_watch import SlotWatch


@dataclass
class _Copy:
    job: int
    after: int  #: so many launches of the compute stream must have run
    run: Callable[[], object]


class Device:
    """The streams of one rank's device. ``laziness``: how seldom a stream moves by itself."""

    def __init__(self, rng: random.Random, laziness: float) -> None:
        self._rng = rng
        self._laziness = laziness
        self._compute: deque[Callable[[], None]] = deque()
        self._ran = 0
        self.launched = 0
        self.copied = {"store": 0, "load": 0}
        self._streams: dict[str, deque[_Copy]] = {"store": deque(), "load": deque()}

    # --- where its memory is, and how it is reached: a CUDA device has other answers ---

    place = torch.device("cpu")

    def pages(self, cache: torch.Tensor) -> Any:
        """Return a layer's KV as words of 64 bits."""
        return cache.view(torch.int64).numpy().view(np.uint64)

    def put(self, values: NDArray[Any]) -> Any:
        """Return what the host has computed, for work that is launched."""
        return values

    def look(self, wrong: Any, refuse: Callable[[NDArray[Any]], None]) -> None:
        """Call ``refuse`` once the device has found something wrong: here, at once."""
        if wrong.any():
            refuse(wrong)

    def late(self, worker: OffloadingWorker, watch: SlotWatch) -> OffloadingWorker:
        """Return the worker, with its copies on this device's streams. ``watch`` sees each."""
        return LateWorker(worker, self, watch)

    # --- what is launched ---

    def launch(self, run: Callable[[], None]) -> int:
        """Queue work on the compute stream; return how much has been queued there so far."""
        self._compute.append(run)
        self.launched += 1
        return self.launched

    def copy(self, stream: str, job: int, run: Callable[[], object]) -> None:
        """Queue a copy, behind what the compute stream has now."""
        self._streams[stream].append(_Copy(job, self.launched, run))

    def move(self) -> None:
        """Let each stream run for a while, or not."""
        if not (self._compute or any(self._streams.values())):
            return
        names = ["compute", *self._streams]
        self._rng.shuffle(names)
        for name in names:
            while self._rng.random() > self._laziness and self._run_next(name):
                pass

    def synchronize(self, launched: int | None = None) -> None:
        """Wait for the compute stream: for so many launches, or all."""
        end = self.launched if launched is None else launched
        while self._ran < end:
            self._run_next("compute")

    def wait(self, jobs: set[int]) -> None:
        """Wait for copies."""
        for name, stream in self._streams.items():
            while any(copy.job in jobs for copy in stream):
                self._run_next(name)

    def drain(self) -> None:
        """Run all there is."""
        self.synchronize()
        for name in self._streams:
            while self._run_next(name):
                pass

    def _run_next(self, name: str) -> bool:
        if name == "compute":
            if not self._compute:
                return False
            self._ran += 1
            self._compute.popleft()()
            return True
        stream = self._streams[name]
        if not stream:
            return False
        copy = stream.popleft()
        self.synchronize(copy.after)
        copy.run()
        self.copied[name] += 1
        return True


class LateWorker(OffloadingWorker):
    """kvtier's own worker, on a device's streams: it is asked to copy when its turn has come."""

    def __init__(self, real: Any, device: Device, watch: SlotWatch) -> None:
        self.real = real
        self._device = device
        self._watch = watch

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Queue a copy to the host."""

        def copy() -> None:
            self._watch.gpu_copies("store", dst_spec.block_ids)
            self.real.submit_store(job_id, src_spec, dst_spec)

        self._device.copy("store", job_id, copy)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: Any,
        dst_spec: Any,
        expedited: bool = False,
    ) -> bool:
        """Queue a copy from the host."""
        del expedited

        def copy() -> None:
            self._watch.gpu_copies("load", src_spec.block_ids)
            self.real.submit_load(job_id, src_spec, dst_spec)

        self._device.copy("load", job_id, copy)
        return True

    def get_finished(self) -> list[Any]:
        """Return what has been copied since this was last asked."""
        finished: list[Any] = self.real.get_finished()
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Wait for these copies."""
        self._device.wait(job_ids)

    def shutdown(self) -> None:
        """End what was begun, as CUDA's worker does, and release the memory."""
        self._device.drain()
        self.real.shutdown()
