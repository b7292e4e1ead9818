"""Warns at start if a restart, or another engine, can't find the blocks that this engine stores.

Weights that can't be identified count as new each time: such an engine begins in a generation of
its own, unless ``weights_version`` names them.

A block's key is vLLM's hash of its tokens, and the first hash of each prompt begins with a seed.
With ``sha256`` (vLLM's default) and ``sha256_cbor`` the seed is the same everywhere. With
``xxhash`` and ``xxhash_cbor`` each process draws its own, unless ``PYTHONHASHSEED`` is set.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from kvtier.plugin_api.log import log
from kvtier.settings.plugins import lasting_tiers
from kvtier.vllm.identity.weights import why_unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.settings.runtime_config import RuntimeConfig

SEED_VARIABLE = "PYTHONHASHSEED"


def hash_seed_is_random(algorithm: str) -> bool:
    """Return whether another process, with the same environment, would hash differently."""
    hash_fn = get_hash_fn_by_name(algorithm)
    return bool(resolve_none_hash_seed(hash_fn) != resolve_none_hash_seed(hash_fn))


def apart_if_unknown(config: RuntimeConfig, facts: Mapping[str, Any]) -> RuntimeConfig:
    """Return the configuration, with a unique ``weights_version`` if the weights are unknown.

    ``facts``: of the namespace. Warns if a tier outlives this process or is shared.
    """
    reason = why_unknown(facts.get("worker", {}))
    if reason is None or config.weights_version:
        return config
    tiers = lasting_tiers(config.tiers)
    if tiers:
        log.warning(
            "this model's weights cannot be identified: neither a restart nor another engine will "
            "find the blocks that these tiers store. Name the weights by the key weights_version, "
            "with a new name for each change",
            tiers=", ".join(tiers),
            reason=reason,
        )
    return replace(config, weights_version=f"unknown-{uuid4().hex}")


def warn_of_lonely_tiers(config: RuntimeConfig, facts: Mapping[str, Any]) -> bool:
    """Warn if a tier outlives this process or is shared, but no other process can use it.

    ``facts``: of the namespace. Returns whether it warned. Scheduler process.
    """
    algorithm = facts.get("worker", {}).get("block_hash", {}).get("algorithm")
    tiers = lasting_tiers(config.tiers)
    if not tiers or algorithm is None or not hash_seed_is_random(str(algorithm)):
        return False
    log.warning(
        "block hashes differ from process to process: neither a restart nor another engine will "
        "find what these tiers store. Set the environment variable to the same number for all "
        "engines, or --prefix-caching-hash-algo to sha256",
        tiers=", ".join(tiers),
        prefix_caching_hash_algo=str(algorithm),
        variable=SEED_VARIABLE,
        value=os.environ.get(SEED_VARIABLE),
    )
    return True
