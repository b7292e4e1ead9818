"""Derives the facts that vLLM needs about one secondary tier from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import Locality, Medium
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.settings.plugins import backend_class
from kvtier.vllm.hosted.backend import HostedBackend

if TYPE_CHECKING:
    from kvtier.settings.runtime_config import TierConfig


class TierFacts:
    """A tier's name, medium, locality, and vLLM's name for a hit in it."""

    def __init__(self, config: TierConfig) -> None:
        self.name = config.name
        backend = backend_class(config.type)
        medium = backend.medium_of(config.options)
        self.medium = None if medium is None else Medium(medium)
        self.locality = None if config.locality is None else Locality(config.locality)
        if issubclass(backend, HostedBackend):
            self.hit_source = backend.hit_source_of(config.options)
        else:
            is_memory = self.medium is Medium.CPU
            self.hit_source = CacheHitSource.HOST if is_memory else CacheHitSource.DISK
