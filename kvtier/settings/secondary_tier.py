"""Reads an entry of vLLM's ``secondary_tiers`` that is one of kvtier's tiers.

::

    {"type": "KVTierSecondaryTier", "module_path": "kvtier.vllm",
     "tier": {"type": "disk", "path": "/nvme/kvtier", "capacity_bytes": "200GB"}}

``tier`` is an entry as in ``secondary_tiers`` of kvtier itself. Beside it are the keys of
``kv_connector_extra_config`` that are about tiers, but none about a primary tier, which is vLLM's
here. vLLM's factory removes ``type``, ``module_path`` and ``backpressure``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.options import Options
from kvtier.settings.extra_config import for_rank
from kvtier.settings.runtime_config import ADMIT_ALL, Locality, RuntimeConfig, TierConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

WHERE: Final = "secondary_tiers (KVTierSecondaryTier)"

STAGING_FRACTION: Final = 16
STAGING_BLOCKS_MIN: Final = 32

NOT_BEHIND_VLLM: Final = (
    "is not there for a tier of vLLM's own tiering. Remove it, or use kvtier's spec "
    '(spec_name "KVTierOffloadingSpec")'
)

_OF_A_PRIMARY_TIER: Final = (
    "eviction_policy",
    "lease_timeout_s",
    "max_tracker_size",
    "store_reserve_fraction",
    "store_threshold",
)


@dataclass(frozen=True, kw_only=True)
class SecondaryTierOptions:
    """Keys of an entry besides those of ``kv_connector_extra_config``. Never instantiated."""

    tier: option.Table
    """the tier, as an entry of kvtier's own `secondary_tiers`"""
    staging_bytes: Annotated[option.Size, Meta(ge=1)] | None = None
    """bytes of host memory, beside `cpu_bytes_to_use`, through which blocks go to the tier and
    back; by default a sixteenth of the primary tier, and 32 blocks at least"""
    locality: Locality | None = None
    """as in `tier`, where it may stand instead"""


def read_secondary_tier(
    values: Mapping[str, Any],
    *,
    slot_count: int,
    block_bytes: int,
    number: int = 1,
    dp_rank: int = 0,
) -> RuntimeConfig:
    """Return the configuration of one tier; its slots are the staging slots.

    ``slot_count``: of the primary tier. ``number``: the tier's place in the list, from 1 on.
    ``dp_rank``: the engine's, which replaces ``{dp_rank}``. Raises ``ConfigError``.
    """
    options = Options(values, WHERE)
    given = option.read(SecondaryTierOptions, options)
    for key in _OF_A_PRIMARY_TIER:
        options.refuse(key, "is about a primary tier, which is vLLM's here. Remove it")
    options.refuse(
        "secondary_tiers", 'has no meaning here: an entry is one tier. Give it as "tier"'
    )
    tier = given["tier"]
    if given["locality"] is not None:
        tier.setdefault("locality", given["locality"])
    own = option.options_of(SecondaryTierOptions)
    rest = {key: value for key, value in values.items() if key not in own}
    config = RuntimeConfig.from_mapping(
        {**rest, "secondary_tiers": [for_rank(tier, dp_rank)]},
        slot_count=_staging_slots(options, given["staging_bytes"], slot_count, block_bytes),
        block_bytes=block_bytes,
    )
    (read,) = config.tiers
    refuse_behind_vllm(read)
    name = tier.get("name") or f"{number}:{read.type}"
    ours = replace(read, name=name, may_be_request_scoped=False)
    return replace(config, tiers=(ours,), eviction_policy="lru")  # nothing stays in it


def refuse_behind_vllm(tier: TierConfig) -> None:
    """Raise ``ConfigError`` for options that only work behind kvtier's own primary tier."""
    options = Options({}, WHERE)
    if tier.admission != ADMIT_ALL:
        raise options.error("admission", tier.admission, NOT_BEHIND_VLLM)
    if tier.type == "vllm" and tier.options.get("request_scoped"):
        raise options.error("request_scoped", tier.options["request_scoped"], NOT_BEHIND_VLLM)


def _staging_slots(
    options: Options, staging_bytes: int | None, slot_count: int, block_bytes: int
) -> int:
    if staging_bytes is None:
        return max(1, min(slot_count, max(STAGING_BLOCKS_MIN, slot_count // STAGING_FRACTION)))
    slots = staging_bytes // block_bytes
    if slots < 1:
        raise options.error(
            "staging_bytes", staging_bytes, f"holds no block of {block_bytes} bytes. Raise it"
        )
    return min(slots, slot_count)
