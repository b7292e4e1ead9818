"""Reads ``kv_connector_extra_config``: vLLM's keys and kvtier's, all checked.

vLLM itself reads some of the keys, and takes what it can't use silently
(``bool("false")`` is true), or breaks on ``null``. They are checked here too, so that a bad value
is refused at start instead of meaning something else; and vLLM is given what it can use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtier.plugin_api.options import Options
from kvtier.settings.runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.settings.runtime_config import Ignores

RANK: Final = "{dp_rank}"
"""In a text of a tier: here goes the number of the engine, for what no two engines may share."""

WHERE: Final = "kv_connector_extra_config"

_FLAGS: Final = ("offload_prompt_only", "self_describing_kv_events", "canonical_layout")
_NAMES: Final = ("spec_name", "spec_module_path")
_TOKENS: Final = ("block_size", "blocks_per_chunk")
_SIZES: Final = ("cpu_bytes_to_use", "sync_load_budget_bytes")  # the second one since vLLM 0.33


def read_settings(
    extra_config: Mapping[str, Any],
    *,
    slot_count: int,
    block_bytes: int,
    dp_rank: int = 0,
    ignores: Ignores | None = None,
) -> RuntimeConfig:
    """Return the runtime's configuration. Raises ``ConfigError`` for the first bad key.

    ``dp_rank``: which of vLLM's data-parallel engines this is. All have one configuration.
    ``ignores``: tells which unknown keys to pass over; without it, all are refused.
    """
    extra_config = _of_rank(extra_config, dp_rank)
    options = Options(extra_config, WHERE)
    for key in _FLAGS:
        options.flag(key, default=False)
    for key in _NAMES:
        options.text(key, "")
    for key in _TOKENS:
        options.integer(key, 1, minimum=1)
    _sizes(options)
    if options.has("block_size") and options.has("blocks_per_chunk"):
        raise options.error(
            "block_size",
            extra_config["block_size"],
            "excludes blocks_per_chunk, which says the same in blocks. Remove one of the two",
        )
    options.refuse(
        "tier_poll_interval_s",
        "has no meaning here: tiers run on threads of their own and are never polled. Remove it",
    )
    return RuntimeConfig.from_mapping(
        extra_config,
        slot_count=slot_count,
        block_bytes=block_bytes,
        read_elsewhere=(*_FLAGS, *_NAMES, *_TOKENS, *_SIZES),
        ignores=ignores,
    )


def cpu_bytes_to_use(extra_config: Mapping[str, Any]) -> int:
    """Return the bytes of the primary tier. Raises ``ConfigError``, also if there are none.

    A float may have a fraction: vLLM computes one from ``--kv-offloading-size``, in GiB.
    """
    return _primary_size(Options(extra_config, WHERE))


def for_vllm(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what vLLM can use: sizes in whole bytes, and no ``null``, which means not given.

    Raises ``ConfigError`` for a bad size.
    """
    given = {key: value for key, value in extra_config.items() if value is not None}
    return {**given, **_sizes(Options(given, WHERE))}


def _sizes(options: Options) -> dict[str, int]:
    """Read the sizes that are given."""
    options.allow(*_SIZES)
    sizes = {}
    if options.has("cpu_bytes_to_use"):
        sizes["cpu_bytes_to_use"] = _primary_size(options)
    if options.has("sync_load_budget_bytes"):
        sizes["sync_load_budget_bytes"] = options.size("sync_load_budget_bytes")
    return sizes


def _primary_size(options: Options) -> int:
    return options.size("cpu_bytes_to_use", minimum=1, rounds_down=True)


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
