"""kvtier as an offloading spec of vLLM: the only place that imports vllm."""

from kvtier.vllm.spec import KVTierOffloadingSpec as KVTierOffloadingSpec

__all__ = ["KVTierOffloadingSpec"]
