"""kvtier in vLLM: an offloading spec, or a tier of vLLM's own. The only place that imports vllm.

All of vLLM's processes import this package if kvtier is installed (``plugin.py``), so nothing is
imported before it is needed. From then on kvtier's log is vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.plugin_api.log import log
from kvtier.vllm.vllm_log import write_to_vllm

if TYPE_CHECKING:
    from kvtier.vllm.secondary_tier import KVTierSecondaryTier as KVTierSecondaryTier
    from kvtier.vllm.spec import KVTierOffloadingSpec as KVTierOffloadingSpec

__all__ = ["KVTierOffloadingSpec", "KVTierSecondaryTier"]

log.send_to(write_to_vllm)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of any kind
    """Import the requested class: an engine uses only one of the two."""
    if name == "KVTierOffloadingSpec":
        from kvtier.vllm.spec import KVTierOffloadingSpec  # noqa: PLC0415 - lazy

        return KVTierOffloadingSpec
    if name == "KVTierSecondaryTier":
        from kvtier.vllm.secondary_tier import KVTierSecondaryTier  # noqa: PLC0415 - lazy

        return KVTierSecondaryTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
