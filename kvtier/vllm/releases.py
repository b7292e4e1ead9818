"""Flags for the differences between the releases of vLLM that kvtier runs in, one each.

A flag depends on what the installed vLLM has, not on its version: so it is right for a patched
release, or one in between. If a difference can't be detected, another change of the same release
stands for it. Once the older release is no longer supported, its flags go, with all that they
switch. Faults of both releases are in ``workarounds/``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from vllm.v1.kv_offload.base import OffloadingEvent, OffloadingManager, ReqContext
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvtier.plugin_api.log import log
from kvtier.vllm.relied_on import REMEDY

# --- since 0.33, in which a manager has ``on_reset_flushed``, ``lock`` and ``config_info`` ---

NOTIFIES_WHEN_FLUSHED: Final = hasattr(OffloadingManager, "on_reset_flushed")
"""A manager is notified when workers have released the blocks that were in use at a reset. Before,
kvtier waited for a number of steps."""

OFFERS_BEFORE_STEP_ENDS: Final = NOTIFIES_WHEN_FLUSHED
"""A step's chunks are offered before its ``on_schedule_end``, not after it."""

LOADS_WHEN_PREEMPTED: Final = NOTIFIES_WHEN_FLUSHED
"""A request that was preempted between two steps may load in the next one. Before, the connector's
assertion ended the engine."""

REPLACES_TABLES: Final = NOTIFIES_WHEN_FLUSHED
"""A request whose prompt is streamed restarts with each part. Before, its table of GPU blocks was
appended to the connector's table for it, so the wrong blocks were stored under its keys."""

HAS_METADATA_EVENTS: Final = "metadata_only" in {
    each.name for each in dataclasses.fields(OffloadingEvent)
}
"""An event may end the tracker's description of a block, and announce nothing."""

PROMOTION_LATENCY: Final[str | None] = getattr(TieringOffloadingMetrics, "PROMOTION_LATENCY", None)
"""The name of vLLM's metric for it, if it has one."""


def sync_load_budget(made: Any) -> int:  # noqa: ANN401 - vLLM has no stubs
    """Return how many bytes a connector may load in the step that uses them; 0 before 0.33."""
    return int(getattr(made, "sync_load_budget_bytes", 0))


# --- in both, but perhaps not in a later release ---

HAS_POSITIONS: Final = "_offload_key_positions" in getattr(ReqContext, "__dataclass_fields__", {})
"""The token at which each of a request's keys ends is published, though privately."""


def positions_of(req_context: ReqContext) -> dict[bytes, int]:
    """Return the end token of each key of a request, in the order in which vLLM made the keys."""
    positions: dict[bytes, int] = getattr(req_context, "_offload_key_positions", {})
    return positions


def warn_without_positions() -> None:
    """Warn of the cost of a vLLM that doesn't publish where a request's keys end."""
    if not HAS_POSITIONS:
        log.warning(
            "this vLLM does not report the positions of keys: blocks are looked up one by one, "
            "and models with several KV-cache groups are served from the primary tier only",
            remedy=REMEDY,
        )
