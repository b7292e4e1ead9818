"""Reads ``kv_connector_extra_config``: vLLM's keys and kvtier's, all checked.

vLLM itself reads some of the keys, and takes what it can't use silently
(``bool("false")`` is true). They are checked here too, so that a bad value is
refused at start instead of meaning something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtier.config import RuntimeConfig
from kvtier.options import Options

if TYPE_CHECKING:
    from collections.abc import Mapping

RANK: Final = "{dp_rank}"
"""In a text of a tier: here goes the number of the engine, for what no two engines may share."""

_FLAGS: Final = ("offload_prompt_only", "self_describing_kv_events", "canonical_layout")
_NAMES: Final = ("spec_name", "spec_module_path")
_SIZES: Final = ("cpu_bytes_to_use", "block_size", "blocks_per_chunk")
_COUNTS: Final = ("sync_load_budget_bytes",)  # vLLM 0.33


def read_settings(
    extra_config: Mapping[str, Any], *, slot_count: int, block_bytes: int, dp_rank: int = 0
) -> RuntimeConfig:
    """Return the runtime's configuration. Raises ``ConfigError`` for the first bad key.

    ``dp_rank``: which of vLLM's data-parallel engines this is. All have one configuration.
    """
    extra_config = _of_rank(extra_config, dp_rank)
    options = Options(extra_config, "kv_connector_extra_config")
    for key in _FLAGS:
        options.flag(key, default=False)
    for key in _NAMES:
        options.text(key, "")
    for key in _SIZES:
        options.integer(key, 1, minimum=1)
    for key in _COUNTS:
        options.integer(key, 0)
    options.refuse(
        "tier_poll_interval_s",
        "has no meaning here: tiers run on threads of their own and are never polled. Remove it",
    )
    return RuntimeConfig.from_mapping(
        extra_config,
        slot_count=slot_count,
        block_bytes=block_bytes,
        read_elsewhere=(*_FLAGS, *_NAMES, *_SIZES, *_COUNTS),
    )


def _of_rank(extra_config: Mapping[str, Any], dp_rank: int) -> Mapping[str, Any]:
    tiers = extra_config.get("secondary_tiers")
    if not isinstance(tiers, list) or not all(isinstance(tier, dict) for tier in tiers):
        return extra_config  # whoever reads them refuses them
    number = str(dp_rank)
    tiers = [
        {
            key: value.replace(RANK, number) if isinstance(value, str) else value
            for key, value in tier.items()
        }
        for tier in tiers
    ]
    return {**extra_config, "secondary_tiers": tiers}
