"""Tells whether a program that needs a CUDA device can run here, and puts vLLM on it.

Imports neither torch nor vLLM before it is asked: one that is missing is what it says.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_DEVICE = 77
"""Exit status of a program that has checked nothing, because there is nothing to check it on."""

_COMPILED = "vllm._C_stable_libtorch"
_ANY_DIRECTION = 4  #: cudaMemcpyDefault


def why_no_cuda(*, compiled: bool) -> str | None:
    """Return what is missing, in a sentence, or None. ``compiled``: vLLM's kernels are needed."""
    for package in ("torch", "vllm"):
        if find_spec(package) is None:
            return (
                f"{package} is not installed for {sys.executable}. Use the Python that has vLLM "
                "for CUDA: make PYTHON=..."
            )
    try:
        version("kvtier")
    except PackageNotFoundError:
        return f"kvtier is not installed beside them. {sys.executable} -m pip install . does it."
    import torch

    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA. Use the Python that has vLLM for "
            "CUDA (pip install vllm): make PYTHON=..."
        )
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds none. Run this on a machine with an NVIDIA GPU, "
            "which nvidia-smi lists and CUDA_VISIBLE_DEVICES does not hide."
        )
    if compiled and not _is_compiled():
        return (
            "vLLM has no compiled parts for CUDA here, but its Python files alone or its build for "
            "CPUs. pip install vllm gets them; the rig (make gpu) does without."
        )
    return None


@contextmanager
def vllm_on_cuda() -> Iterator[None]:
    """Import vLLM's modules in this block; after it they are on CUDA, compiled parts or not.

    Without them, modules of kernels can't be imported on CUDA. So all are imported as on a
    CPU (but that memory can be pinned, which modules ask while they are imported), and then
    the one object that they ask for their platform becomes CUDA's. What would copy blocks is
    a kernel, for which ``copy_batch`` stands in: the same copies on the same stream, one
    call for each.
    """
    import vllm.platforms

    if _is_compiled():
        yield
        platform = vllm.platforms.current_platform
        assert platform.is_cuda(), f"vLLM has chosen {type(platform).__name__}"
        return
    from vllm.platforms.cpu import CpuPlatform

    class CpuThatPins(CpuPlatform):  # type: ignore[misc]
        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return True

    platform = CpuThatPins()
    vllm.platforms._current_platform = platform
    # "Is it the build for CPUs?" What the files came from says nothing of where they are used.
    vllm.platforms.vllm_version_matches_substr = lambda _: False
    yield
    import vllm._custom_ops

    sys.modules[_COMPILED] = ModuleType(_COMPILED)
    from vllm.platforms.cuda import CudaPlatform

    platform.__class__ = CudaPlatform
    vllm._custom_ops.swap_blocks_batch = copy_batch


def copy_batch(
    sources: Any, targets: Any, sizes: Any, is_src_access_order_any: bool = False
) -> None:
    """Queue copies between addresses on the current stream, as vLLM does before CUDA 12.8."""
    import torch
    from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

    del is_src_access_order_any
    copy = CudaRTLibrary().lib.cudaMemcpyAsync
    address = ctypes.c_void_p
    copy.argtypes = [address, address, ctypes.c_size_t, ctypes.c_int, address]
    stream = torch.cuda.current_stream().cuda_stream
    for source, target, size in zip(
        sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
    ):
        error = copy(target, source, size, _ANY_DIRECTION, stream)
        assert error == 0, f"cudaMemcpyAsync: error {error}"


def _is_compiled() -> bool:
    return find_spec(_COMPILED) is not None
