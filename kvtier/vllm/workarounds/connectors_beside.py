"""Refuses a place behind another ``OffloadingConnector`` in a ``MultiConnector``.

vLLM defines metrics only for the first connector of each class, and ends its front end at a metric
of a later one that is not among them: the engine would start, and end with its first request. That
holds for kvtier's spec, and for a kvtier tier in vLLM's own spec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

CONNECTOR: Final = "OffloadingConnector"

OWN_SPEC: Final = ("KVTierOffloadingSpec", "kvtier.vllm")
"""Name and module of kvtier's own spec, as written in configurations."""


def check_connectors(spec_name: str, vllm_config: Any) -> None:  # noqa: ANN401 - vLLM is untyped here
    """Raise ``ConfigError`` if the first ``OffloadingConnector`` is another spec's.

    ``spec_name``: kvtier's. ``vllm_config``: the whole engine's; None if it is unknown.
    """
    settings = _first(vllm_config)
    if settings is None:
        return
    first = settings.get("spec_name")
    if first != spec_name:
        raise ConfigError(
            f"connectors: an {CONNECTOR} with spec_name={first!r} stands before the one with "
            f"spec_name={spec_name!r}. vLLM knows the metrics of the first one only, and would "
            "end at a metric of the other one's. Put kvtier's entry before it."
        )


def check_place_of_tier(
    tier_name: str, spec_name: str, module: str, vllm_configs: Iterable[Any]
) -> None:
    """Raise ``ConfigError`` if the first ``OffloadingConnector`` has no kvtier metrics.

    ``tier_name``: the tier's class; ``spec_name``: kvtier's spec; ``module``: that of both.
    ``vllm_configs``: the known ones of this connector's and the whole engine's configurations.
    """
    for config in vllm_configs:
        settings = _first(config)
        if settings is None:
            continue
        first = settings.get("spec_name")
        tiers = settings.get("secondary_tiers") or ()
        if (tier_name, module) in [(each.get("type"), each.get("module_path")) for each in tiers]:
            continue
        if (first, settings.get("spec_module_path")) != (spec_name, module):
            raise ConfigError(
                f"connectors: an {CONNECTOR} with spec_name={first!r} and no {tier_name} stands "
                f"before the one with {tier_name}. vLLM knows the metrics of the first one only, "
                f"and would end at a metric of kvtier's. Put the entry with {tier_name} before it."
            )


def _first(vllm_config: Any) -> dict[str, Any] | None:  # noqa: ANN401 - vLLM is untyped here
    """Return the settings of a ``MultiConnector``'s first ``OffloadingConnector``, if any."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    for entry in extra.get("connectors", ()):
        if isinstance(entry, dict) and entry.get("kv_connector") == CONNECTOR:
            return entry.get("kv_connector_extra_config") or {}
    return None
