"""Reads a replay's settings: vLLM's configuration mapping, and short forms of its keys."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.options import did_you_mean
from kvtier.plugin_api.sizes import read_bytes
from kvtier.settings.extra_config import cpu_bytes_to_use, read_settings
from kvtier.tools.replay.gpu import Verify

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.settings.runtime_config import RuntimeConfig
    from kvtier.tools.replay.engine_model import EngineModel

SHORT_TIERS: Final = {
    "fs": ("root_dir",),
    "disk": ("path", "capacity_bytes"),
    "memory": ("capacity_bytes",),
}
"""The keys that the short form of a tier has behind its type, each after a colon."""

FOLDER_KEYS: Final = {"fs": "root_dir", "disk": "path"}
"""The key that names a tier's folder, by type."""

_SHARE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True)
class ReplaySettings:
    """All settings of a replay, besides its trace."""

    runtime: RuntimeConfig
    model: EngineModel
    jumps: bool = True  #: the clock skips stated time
    verify: Verify = Verify.FULL
    keep: bool = False  #: leave the tiers' folders as they are in the end


def read_slots(text: str, *, block_bytes: int, distinct_blocks: int) -> int:
    """Return the slots in a size, or in a share of the trace's distinct blocks such as 2%."""
    share = _SHARE.fullmatch(text)
    if share is not None:
        if not distinct_blocks:
            raise ConfigError(f"--dram={text!r}: no request has a whole block. Use another trace.")
        slots = int(distinct_blocks * float(share[1]) / 100)
        what = f"of {distinct_blocks} distinct blocks"
    else:
        slots = read_bytes(text, "--dram") // block_bytes
        what = f"holds no block of {block_bytes} bytes"
    if slots < 1:
        raise ConfigError(f"--dram={text!r} {what}: the primary tier has no slot. Raise it.")
    return slots


def read_config_file(path: str) -> dict[str, Any]:
    """Return ``kv_connector_extra_config`` from a JSON file, which may have keys around it."""
    try:
        values = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: not JSON ({error}).") from error
    if isinstance(values, dict):
        values = values.get("kv_connector_extra_config", values)
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: not a mapping. Write kv_connector_extra_config.")
    return values


def read_tier(text: str) -> dict[str, Any]:
    """Return an entry of ``secondary_tiers`` from its JSON, or from a short form: ``fs:PATH``."""
    if text.lstrip().startswith("{"):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--tier {text}: not JSON ({error}).") from error
        assert isinstance(values, dict)
        return values
    kind, _, rest = text.partition(":")
    keys = SHORT_TIERS.get(kind, ())
    given = rest.rsplit(":", len(keys) - 1) if keys else []
    if not keys or len(given) != len(keys) or not all(given):
        short = ", ".join(f"{kind}:{':'.join(keys).upper()}" for kind, keys in SHORT_TIERS.items())
        meant = "" if keys else did_you_mean(kind, SHORT_TIERS)
        raise ConfigError(
            f"--tier {text!r} is unknown.{meant} Write {short}, or an entry of "
            "secondary_tiers as JSON."
        )
    return {
        "type": kind,
        **{
            key: read_bytes(value, "--tier") if key == "capacity_bytes" else value
            for key, value in zip(keys, given, strict=True)
        },
    }


def read_runtime(
    values: Mapping[str, Any],
    *,
    dram: str | None,
    tiers: Sequence[str],
    policy: str | None,
    block_bytes: int,
    distinct_blocks: int,
) -> RuntimeConfig:
    """Return the runtime's configuration; other given arguments override ``values``."""
    if dram is None:
        if values.get("cpu_bytes_to_use") is None:
            raise ConfigError("the primary tier has no size. Pass --dram, such as 2GiB or 5%.")
        dram = str(cpu_bytes_to_use(values))
    values = dict(values)
    if tiers:
        values["secondary_tiers"] = [read_tier(text) for text in tiers]
    if policy is not None:
        values["eviction_policy"] = policy
    config = read_settings(
        values,
        slot_count=read_slots(dram, block_bytes=block_bytes, distinct_blocks=distinct_blocks),
        block_bytes=block_bytes,
    )
    if policy is None:
        return config
    return replace(
        config, tiers=tuple(replace(tier, eviction_policy=policy) for tier in config.tiers)
    )
