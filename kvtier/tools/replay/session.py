"""One replay from beginning to end: folders, runtime, player, and everything closed again."""

from __future__ import annotations

import resource
import sys
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import xxhash

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Namespace
from kvtier.plugin_api.options import Options
from kvtier.plugin_api.sizes import shown_bytes
from kvtier.runtime import open_runtime, wait_for_servers
from kvtier.tools.replay.clock import ReplayClock
from kvtier.tools.replay.folders import Folders
from kvtier.tools.replay.gpu import StandInGpu
from kvtier.tools.replay.player import Player
from kvtier.tools.replay.settings import FOLDER_KEYS
from kvtier.tools.terminal import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.core.statistics import TierStatistics
    from kvtier.tools.replay.measurements import ReplayMeasured
    from kvtier.tools.replay.settings import ReplaySettings
    from kvtier.tools.replay.traces import Trace


CONNECT_WAIT_S_MIN: Final = 10.0
"""Shortest ``startup_connect_timeout_s`` of each tier: unlike an engine's start, a replay can wait,
and figures of a tier without its server mean nothing."""


@dataclass(frozen=True)
class Replayed:
    """Result of a replay."""

    trace: Trace
    settings: ReplaySettings
    measured: ReplayMeasured
    played: bool  #: to the trace's end
    real_s: float
    replayed_s: float  #: real seconds and skipped ones
    blocks_stored: int  #: by the GPU
    blocks_loaded: int
    blocks_checked: int
    peak_memory_bytes: int  #: of this process, the trace and the report included
    closed: bool  #: all tiers ended in time
    leftovers: list[str]  #: folders that could not be removed


def replay(
    trace: Trace, settings: ReplaySettings, *, should_stop: Callable[[], bool] = lambda: False
) -> Replayed:
    """Play the trace, and show the progress. Raises ``ConfigError`` before a tier starts.

    The folders of tiers are removed even if this raises.
    """
    folders = Folders(keep=settings.keep)
    leftovers: list[str] = []
    try:
        for tier in settings.runtime.tiers:
            key = FOLDER_KEYS.get(tier.type)
            if key is not None and key in tier.options:
                where = f"secondary tier {tier.name}"
                folders.claim(key, Options(tier.options, where).path(key))
        played = _play(trace, settings, should_stop)
    finally:
        pieces = folders.to_remove()
        with progress("removing the tiers' folders", len(pieces)) as bar:
            leftovers += folders.remove(pieces, bar.advance)
    return replace(played, leftovers=leftovers)


def namespace_of(trace: Trace) -> Namespace:
    """Return a namespace that only a replay of the same requests shares."""
    digest = xxhash.xxh3_128(str(trace.block_tokens).encode())
    for request in trace.requests:
        digest.update(array("q", request.blocks).tobytes())
    fields = {"model_name": "kvtier-replay", "trace": digest.hexdigest()}
    return Namespace(facts=fields, vllm_fields=fields)


def _play(trace: Trace, settings: ReplaySettings, should_stop: Callable[[], bool]) -> Replayed:
    config = settings.runtime
    # Events show the contents of each tier, and the ends of cascades.
    watched = tuple(
        replace(
            tier,
            enable_kv_events=True,
            startup_connect_timeout_s=max(tier.startup_connect_timeout_s, CONNECT_WAIT_S_MIN),
        )
        for tier in config.tiers
    )
    config = replace(config, tiers=watched)
    try:
        gpu = StandInGpu(config.slot_count, config.block_bytes, settings.verify)
    except (MemoryError, OSError) as error:
        size = shown_bytes(config.slot_count * config.block_bytes)
        raise ConfigError(
            f"there is no memory for a primary tier of {size}: {error}. Lower --dram, "
            "cpu_bytes_to_use or --block-bytes."
        ) from error
    clock = ReplayClock(jumps=settings.jumps)
    facade = open_runtime(
        config, gpu.memory, namespace_of(trace), collect_events=True, clock=clock.now
    )

    def polled() -> Sequence[TierStatistics]:
        facade.get_finished()
        return facade.statistics().tiers

    closed = False
    try:
        wait_for_servers(config, polled, should_stop, also_open=True)
        clock.begin()
        player = Player(
            trace, facade, gpu, settings.model, clock, [tier.name for tier in config.tiers]
        )
        with progress("replaying", len(trace.requests)) as bar:
            played = player.run(should_stop, bar.advance)
    finally:
        closed = facade.close()
    return Replayed(
        trace=trace,
        settings=settings,
        measured=player.measured,
        played=played,
        real_s=clock.real_s(),
        replayed_s=clock.now(),
        blocks_stored=gpu.blocks_stored,
        blocks_loaded=gpu.blocks_loaded,
        blocks_checked=gpu.blocks_checked,
        peak_memory_bytes=_peak_memory_bytes(),
        closed=closed,
        leftovers=[],
    )


def _peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
