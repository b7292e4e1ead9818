"""Removes what an engine of a benchmark leaves if it is killed."""

from __future__ import annotations

from pathlib import Path

from kvtier.settings.host_memory import SHARED_MEMORY_FOLDER
from kvtier.vllm.region import sweep


def remove_regions(engine_id: str) -> None:
    """Remove the host memory of an engine that is gone."""
    for path in Path(SHARED_MEMORY_FOLDER).glob(f"vllm_offload_{engine_id}*"):
        path.unlink(missing_ok=True)
    sweep(SHARED_MEMORY_FOLDER)
