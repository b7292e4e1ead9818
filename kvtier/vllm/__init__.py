"""kvtier in vLLM: an offloading spec, or a tier of vLLM's own. The only place that imports vllm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.vllm.spec import KVTierOffloadingSpec as KVTierOffloadingSpec

if TYPE_CHECKING:
    from kvtier.vllm.secondary_tier import KVTierSecondaryTier as KVTierSecondaryTier

__all__ = ["KVTierOffloadingSpec", "KVTierSecondaryTier"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of any kind
    """Import the tier when it is asked for: the spec has no use for it."""
    if name == "KVTierSecondaryTier":
        from kvtier.vllm.secondary_tier import KVTierSecondaryTier  # noqa: PLC0415 - lazy

        return KVTierSecondaryTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
