"""Reads ``kv_connector_extra_config``: vLLM's keys and kvtier's, all checked.

vLLM itself reads some of the keys, and silently accepts values it can't use
(``bool("false")`` is true), or breaks on ``null``. They are checked here too, so that a bad value
is refused at start instead of meaning something else; and vLLM gets values that it can use.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - a field's type, read at run time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.options import Options
from kvtier.settings.runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from kvtier.settings.runtime_config import Ignores

RANK: Final = "{dp_rank}"
"""Replaced in a tier's texts, and in ``record``, by the engine's number, for places that no two
engines may share."""

WHERE: Final = "kv_connector_extra_config"


@dataclass(frozen=True, kw_only=True)
class VLLMOptions:
    """Keys that vLLM reads, and kvtier only checks. Never instantiated."""

    spec_name: option.Text
    """for kvtier: `"KVTierOffloadingSpec"`"""
    spec_module_path: option.Text
    """for kvtier: `"kvtier.vllm"`"""
    cpu_bytes_to_use: Annotated[option.Size, Meta(ge=1, extra={"rounds_down": True})]
    """bytes of host memory for the primary tier, all workers together, and for each data-parallel
    engine. Refused: too small for one block; for all engines of a host together, more than its
    memory, or more than is free in `/dev/shm`"""
    block_size: Annotated[option.Integer, Meta(ge=1)] | None = None
    """tokens in one offloaded block; by default vLLM's block size. Refused: a size that is not a
    multiple of it; any other for a model with a sliding window"""
    blocks_per_chunk: Annotated[option.Integer, Meta(ge=1)] = 1
    """vLLM blocks in one offloaded block; replaces `block_size`. Refused: both keys at once; more
    than 1 for a model with a sliding window"""
    offload_prompt_only: option.Flag = True
    """store only the blocks of prompts, not of outputs"""
    self_describing_kv_events: option.Flag = False
    """KV events describe their contents"""
    canonical_layout: option.Flag = False
    """a layout whose bytes do not depend on the parallel sizes"""
    sync_load_budget_bytes: option.Size = 0
    """vLLM reads it, if its release has it; with Mamba layers it counts as 0"""
    secondary_tiers: option.ReadApart[tuple[Mapping[str, Any], ...]] = ()
    """a list of tiers, looked up in this order. Refused: two tiers at one place"""


def read_settings(
    extra_config: Mapping[str, Any],
    *,
    slot_count: int,
    block_bytes: int,
    dp_rank: int = 0,
    ignores: Ignores | None = None,
) -> RuntimeConfig:
    """Return the runtime's configuration. Raises ``ConfigError`` for the first bad key.

    ``dp_rank``: the number of this one of vLLM's data-parallel engines. All have one configuration.
    ``ignores``: returns whether to ignore an unknown key; without it, all are refused.
    """
    extra_config = _of_rank(extra_config, dp_rank)
    options = Options(extra_config, WHERE)
    option.read(VLLMOptions, options, given_only=True)
    if options.has("block_size") and options.has("blocks_per_chunk"):
        raise options.error(
            "block_size",
            extra_config["block_size"],
            "excludes blocks_per_chunk, which sets the same in blocks. Remove one of the two",
        )
    options.refuse(
        "tier_poll_interval_s",
        "has no meaning here: tiers run on threads of their own and are never polled. Remove it",
    )
    return RuntimeConfig.from_mapping(
        extra_config,
        slot_count=slot_count,
        block_bytes=block_bytes,
        read_elsewhere=tuple(option.options_of(VLLMOptions)),
        ignores=ignores,
    )


def cpu_bytes_to_use(extra_config: Mapping[str, Any]) -> int:
    """Return the bytes of the primary tier. Raises ``ConfigError``, also if there are none.

    A float may have a fraction: vLLM computes one from ``--kv-offloading-size``, in GiB.
    """
    options = Options(extra_config, WHERE)
    size: int = option.options_of(VLLMOptions)["cpu_bytes_to_use"].value(
        options, "cpu_bytes_to_use"
    )
    return size


def for_vllm(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys in a form vLLM can use: sizes in whole bytes, and no ``null`` (not given).

    Raises ``ConfigError`` for a bad value.
    """
    given = {key: value for key, value in extra_config.items() if value is not None}
    return {**given, **option.read(VLLMOptions, Options(given, WHERE), given_only=True)}


def for_rank(tier: Mapping[str, Any], dp_rank: int) -> dict[str, Any]:
    """Return a tier's keys with ``{dp_rank}`` replaced by the number of the engine."""
    number = str(dp_rank)
    return {
        key: value.replace(RANK, number) if isinstance(value, str) else value
        for key, value in tier.items()
    }


def _of_rank(extra_config: Mapping[str, Any], dp_rank: int) -> Mapping[str, Any]:
    record = extra_config.get("record")
    if isinstance(record, str):
        extra_config = {**extra_config, "record": record.replace(RANK, str(dp_rank))}
    tiers = extra_config.get("secondary_tiers")
    if not isinstance(tiers, list) or not all(isinstance(tier, dict) for tier in tiers):
        return extra_config  # the code that reads them refuses them
    return {**extra_config, "secondary_tiers": [for_rank(tier, dp_rank) for tier in tiers]}
