"""Samples of a server, from what its ``/metrics`` say: for the same page as the other layers'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.engine.link.circuit_breaker import BreakerState, worst
from kvtier.engine.link.tier_health import NAMES
from stress.engine.vllm_server import BLOCK_BYTES, BLOCK_TOKENS
from stress.record import NOTICED, Sample

if TYPE_CHECKING:
    from stress.engine.watch import Watch

DISK: Final = "1:disk"
FS: Final = "2:fs"
TIERS: Final = (DISK, FS)


def sample_of(watch: Watch, at_s: float, requests: int, fs_blocks: int) -> Sample:
    """Return this moment. ``fs`` doesn't count its blocks: ``fs_blocks`` are its files."""
    on_disk = watch.gauge("kvtier:tier_backend", tier=DISK, count="blocks")
    return Sample(
        at_s=round(at_s, 3),
        requests=requests,
        blocks_read=int(watch.total("vllm:kv_offload_load_bytes")) // BLOCK_BYTES,
        blocks_stored=int(watch.total("vllm:kv_offload_store_bytes")) // BLOCK_BYTES,
        lookups=int(watch.total("vllm:external_prefix_cache_queries")) // BLOCK_TOKENS,
        hits=int(watch.total("vllm:external_prefix_cache_hits")) // BLOCK_TOKENS,
        resident={
            "primary": _slots(watch, "ready"),
            DISK: int(on_disk or 0),
            FS: fs_blocks,
        },
        breakers={tier: state for tier in TIERS if (state := breaker_of(watch, tier)) is not None},
        quarantined=_slots(watch, "quarantined"),
    )


def breaker_of(watch: Watch, tier: str) -> str | None:
    """Return the worst state of a tier's breakers; None if the server has published none yet."""
    found = (
        watch.gauge("kvtier:tier_breaker_state", tier=tier, work=work) for work in NAMES.values()
    )
    states = [BreakerState(int(value)) for value in found if value is not None]
    return worst(states).name if states else None


def noticed_by(watch: Watch, tier: str) -> dict[str, int]:
    """Return what a tier has noticed of the faults, over all servers."""
    return {name: int(watch.total(f"kvtier:tier_{name}", tier=tier)) for name in NOTICED}


def blocks_from(watch: Watch, tier: str) -> float:
    """Return how many blocks a tier has delivered, to all servers."""
    return watch.total("vllm:kv_offload_tiering_read_bytes", tier=tier) / BLOCK_BYTES


def _slots(watch: Watch, state: str) -> int:
    return int(watch.gauge("kvtier:primary_slots", state=state) or 0)
