"""A CUDA device that is not there: host memory, and streams that run when somebody asks.

It carries out what vLLM's CUDA platform and worker, vLLM's region and the rig's own
CUDA code ask of torch and of CUDA's runtime, where no device is, so that each line of
them has run. Copies to and from memory that is not pinned are refused. What a device
does by itself (the compute stream overlapping with the copies, kernels that read host
memory) only a device can show.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tests.support.cuda import vllm_on_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IS_DONE = 0.3  #: chance that a copy has ended when somebody looks
_rng = random.Random(0)
_real_empty = torch.empty


class _Mark:
    """A place in a stream's work."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.is_reached = False

    def reach(self) -> None:
        """Run what is before it."""
        while not self.is_reached:
            self._stream.work.popleft()()

    def pass_by(self) -> None:
        self.is_reached = True


class Event:
    """As ``torch.Event``. On the compute stream, which is never late, it is done at once."""

    def __init__(self, **_: Any) -> None:
        self.mark = _Mark(Stream())

    def record(self, stream: Stream | None = None) -> None:
        self.mark = _Mark(stream or Stream())
        if stream is None:
            self.mark.pass_by()
        else:
            stream.work.append(self.mark.pass_by)

    def query(self) -> bool:
        if _rng.random() < IS_DONE:
            self.mark.reach()
        return self.mark.is_reached

    def synchronize(self) -> None:
        self.mark.reach()

    def elapsed_time(self, _end: Event) -> float:
        return 1.0


class Stream:
    """As ``torch.cuda.Stream``."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], Any]] = deque()

    def wait_stream(self, _compute: Stream) -> None:
        """Return: the compute stream has done all."""

    def wait_event(self, event: Event) -> None:
        """Wait for what the event has recorded so far: it may be used again."""
        self.work.append(event.mark.reach)


_current = [Stream()]


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    _current.append(stream)
    yield
    _current.pop()


class Runtime:
    """As vLLM's ``CudaRTLibrary``, for what it asks of it: to pin host memory."""

    pinned: ClassVar[dict[int, int]] = {}  #: size by address

    def cudaHostRegister(self, address: int, size: int) -> int:  # noqa: N802 - CUDA's name
        assert not any(
            address < other + its_size and other < address + size
            for other, its_size in self.pinned.items()
        ), "pinned twice"
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        del self.pinned[address]
        return 0


def _is_pinned(address: int, size: int) -> bool:
    return any(
        first <= address and address + size <= first + its_size
        for first, its_size in Runtime.pinned.items()
    )


def _copy(target: int, source: int, size: int) -> None:
    assert _is_pinned(target, size) or _is_pinned(source, size), "neither end is pinned"
    ctypes.memmove(target, source, size)


def _copy_batch(
    sources: Any, targets: Any, sizes: Any, is_src_access_order_any: bool = False
) -> None:
    del is_src_access_order_any
    for target, source, size in zip(
        targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
    ):
        _current[-1].work.append(partial(_copy, target, source, size))


def _empty(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    del pin_memory
    return _real_empty(*shape, **options)


def _refuse_a_process(*_: Any) -> Any:
    raise AssertionError("on a device, a process of its own would lack vLLM's compiled parts")


@contextmanager
def vllm_on_pretended_cuda() -> Iterator[None]:
    """As ``vllm_on_cuda``, for good: torch and vLLM find a device in this process."""
    with vllm_on_cuda():
        yield
    import vllm._custom_ops
    import vllm.model_executor.models.registry
    import vllm.v1.kv_offload.cpu.host_register

    from tests.rig.cuda_device import CudaDevice

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_name = lambda *_: "a device that is not there"
    torch.cuda._sleep = lambda _: None
    torch.cuda.Stream, torch.cuda.Event, torch.Event = Stream, Event, Event
    torch.cuda.current_stream, torch.cuda.stream = lambda: _current[-1], _on
    torch.Tensor.is_cuda = property(lambda _: True)
    torch.Tensor.pin_memory = lambda tensor: tensor
    torch.empty = _empty
    vllm._custom_ops.swap_blocks_batch = _copy_batch
    vllm.v1.kv_offload.cpu.host_register.CudaRTLibrary = Runtime
    vllm.model_executor.models.registry._run_in_subprocess = _refuse_a_process
    CudaDevice.place = torch.device("cpu")
