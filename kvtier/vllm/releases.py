"""What differs between the releases of vLLM that kvtier runs in: one flag a difference.

A flag goes by what the installed vLLM has, not by its version: a patched release, or one in
between, counts as what it is. Where vLLM shows no trace of a difference, a change of the same
release stands for it. Once the older release is not supported any more, its flags go, with all
that they switch. What both releases do wrong is in ``workarounds/``.
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
so many steps must have ended."""

OFFERS_BEFORE_STEP_ENDS: Final = NOTIFIES_WHEN_FLUSHED
"""A step's chunks are offered before its ``on_schedule_end``, not after it."""

LOADS_WHEN_PREEMPTED: Final = NOTIFIES_WHEN_FLUSHED
"""A request that was preempted between two steps may load in the next one: before, the connector
took that for an error of its own, and its assertion ended the engine."""

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
    """Return how many bytes a connector loads in the step that computes with them; before: none."""
    return int(getattr(made, "sync_load_budget_bytes", 0))


# --- what both have, and a further release may not ---

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
