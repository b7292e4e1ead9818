"""Refuses blocks of several vLLM blocks for layers with a limited attention window.

vLLM's connector leaves those vLLM blocks out of a store that have left a sliding
window. It treats a vLLM block that another request shares as one of these, so a
kvtier block may be stored with a hole: unwritten bytes, which a later request
loads (seen in all tested releases: ``_update_req_states`` in
``vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``). With
one vLLM block in each kvtier block, no block can have a hole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.kv_offload.config import OffloadingConfig


def check_windows(config: OffloadingConfig, vllm_config: Callable[[], Any]) -> None:
    """Raise ``ConfigError`` if blocks could be stored with holes. Worker process, layers loaded.

    ``vllm_config``: returns the worker's whole configuration; called only if it matters.
    """
    if config.cache.blocks_per_chunk == 1:
        return
    specs = _layer_specs(config, vllm_config())
    windows = [s for s in specs if isinstance(s, SlidingWindowSpec | ChunkedLocalAttentionSpec)]
    # Without its hybrid KV-cache manager vLLM keeps all of a mixed model's KV, in one group.
    if windows and (len(config.groups) > 1 or len(windows) == len(specs)):
        raise ConfigError(
            f"kv_connector_extra_config: block_size or blocks_per_chunk makes blocks of "
            f"{config.cache.blocks_per_chunk} vLLM blocks, and this model has layers with a "
            "sliding window: vLLM would store parts of such blocks. Leave both keys out."
        )


def _layer_specs(config: OffloadingConfig, vllm_config: Any) -> list[Any]:  # noqa: ANN401
    """Return the KV-cache spec of each layer whose KV is offloaded."""
    layers = vllm_config.compilation_config.static_forward_context
    names = [name for group in config.groups for name in group.layer_names]
    found = [layers[name].get_kv_cache_spec(vllm_config) for name in names if name in layers]
    return [spec for spec in found if spec is not None]
