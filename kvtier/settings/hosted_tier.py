"""Defines the options of a tier of type ``vllm``, as far as they show without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.options import Options
from kvtier.settings.vllm_keys import NOT_NEEDED

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class HostedOptions:
    """The options, read."""

    tier: option.Table
    """an entry of vLLM's own `secondary_tiers`, which vLLM's factory gets unchanged, except for
    `backpressure`: `{"type": "fs", "root_dir": ...}`, or a class of yours with `module_path`.
    Refused: a tier that serves other engines, such as `kvcr`, but not `p2p`"""

    request_scoped: option.Flag = False
    """`true`: the tier's contents depend on the request. It sees the engine's own requests and
    their `kv_transfer_params`, but only requests that have some. `p2p` does in any case"""

    @classmethod
    def read(cls, options: Mapping[str, Any], where: str) -> HostedOptions:
        """Return the options. Raises ``ConfigError``; ``where`` is for its text."""
        reader = Options(options, where)
        given = cls(**option.read(cls, reader))
        reader.finish()
        inner = Options(given.tier, f"{where}: tier")
        for key in ("enable_kv_events", "locality"):
            inner.refuse(key, "has no meaning here. Set it beside tier, not in it")
        return replace(given, tier={k: v for k, v in given.tier.items() if k not in NOT_NEEDED})
