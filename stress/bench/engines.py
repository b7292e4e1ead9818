"""What the benchmarks of real engines share: how an engine's process is started and left."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.settings.host_memory import SHARED_MEMORY_FOLDER
from kvtier.vllm.memory.region import sweep

if TYPE_CHECKING:
    from collections.abc import Iterator

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engines are stepped by the benchmark
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",  # tiers' threads get the other cores
}


@contextmanager
def own_engine_id() -> Iterator[str]:
    """Name an engine, and remove its host memory at the end: one that is killed leaves it."""
    engine_id = f"bench-{uuid.uuid4()}"
    try:
        yield engine_id
    finally:
        for path in Path(SHARED_MEMORY_FOLDER).glob(f"vllm_offload_{engine_id}*"):
            path.unlink(missing_ok=True)
        sweep(SHARED_MEMORY_FOLDER)
