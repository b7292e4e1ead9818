"""A filesystem that is full, under a ``disk`` and an ``fs`` tier: a pair of lines each, no more."""

from __future__ import annotations

import itertools
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from kvtier.hosts import thread_host
from kvtier.plugin_api.backend import Namespace
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.runtime import open_runtime
from kvtier.settings.runtime_config import RuntimeConfig
from kvtier_backends import incidents
from kvtier_backends.disk import backend as disk_backend
from kvtier_backends.disk.log import region_faults
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S, until
from tests.unit.backends._media import tmpfs

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping
    from pathlib import Path

    from kvtier.core.statistics import TierStatistics
    from kvtier.engine.facade import SchedulerFacade

    Lines = list[MutableMapping[str, Any]]

pytestmark = needs("mount")
BLOCK = 1 << 16
SLOTS = 32
NUMBERS = itertools.count()
BEGUN = {
    "1:disk": "disk tier: fault, logged once until it is over",
    "2:fs": "fs tier: fault, logged once until it is over",
}
OVER = {"1:disk": "disk tier: fault is over", "2:fs": "fs tier: fault is over"}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_host, "RESTART_PAUSE_S", 0.001)
    monkeypatch.setattr(incidents, "EPISODE_S_MIN", 0.0)
    monkeypatch.setattr(region_faults, "NO_ROOM_PAUSE_S", 0.01)
    monkeypatch.setattr(disk_backend, "TICK_S", 0.01)


@contextmanager
def engine(small: Path) -> Iterator[SchedulerFacade]:
    """Run both tiers, each on the whole of the filesystem."""
    shared = {"isolation": "thread", "on_unusable": "skip", "store_timeout_s": PATIENCE_S}
    disk = {"type": "disk", "path": str(small / "disk"), "capacity_bytes": 12 << 20}
    fs = {"type": "fs", "root_dir": str(small / "fs")}
    config = RuntimeConfig.from_mapping(
        {"secondary_tiers": [disk | shared, fs | shared], "breaker_pause_s": 0.01},
        slot_count=SLOTS,
        block_bytes=BLOCK,
    )
    memory = SlotMemory.anonymous(SLOTS, BLOCK)
    facade = open_runtime(config, memory, Namespace({"model": "m"}))
    try:
        yield facade
    finally:
        assert facade.close()


def serve(facade: SchedulerFacade) -> tuple[TierStatistics, ...]:
    """Serve a request of new blocks, as far as host memory has room, and end a step."""
    request = str(next(NUMBERS))
    facade.on_request_started(request)
    keys = [f"{request}-{number}".encode().ljust(36) for number in range(8)]
    grant = facade.prepare_store(keys, request)
    if grant is not None:
        facade.complete_store(grant.keys, request)
    facade.on_request_finished(request)
    facade.step_end()
    return facade.statistics().tiers


def fill(small: Path) -> Path:
    """Take all that is free, by a file that is returned."""
    filler = small / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    with suppress(OSError), filler.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def of(lines: Lines, tier: str, *events: str) -> Lines:
    return [line for line in lines if line["event"] in events and line.get("tier") == tier]


def is_up(facade: SchedulerFacade) -> bool:
    return all(tier.breaker == "CLOSED" for tier in serve(facade))


def test_one_that_fills_up_is_said_with_the_remedy_and_its_end_with_the_blocks(
    tmp_path: Path,
) -> None:
    """The ``disk`` tier goes on in the regions that it has: that is not the end of it."""
    with tmpfs(tmp_path / "small", "64m") as small, capture_logs() as lines:
        with engine(small) as facade:
            # The disk tier has a third of its regions.
            until(lambda: serve(facade)[0].counts.write_bytes >= 4 << 20)
            filler = fill(small)
            until(lambda: serve(facade) and all(of(lines, *each) for each in BEGUN.items()))
            before = serve(facade)
            until(lambda: serve(facade)[0].counts.write_bytes > before[0].counts.write_bytes)
            until(lambda: serve(facade)[1].counts.stores_rejected > 8)
            assert not any(of(lines, *each) for each in OVER.items())
            filler.unlink()
            until(lambda: serve(facade) and all(of(lines, *each) for each in OVER.items()))
        tiers = facade.statistics().tiers
    for tier in tiers:
        fault, end, *_ = of(lines, tier.name, BEGUN[tier.name], OVER[tier.name])
        assert (fault["event"], end["event"]) == (BEGUN[tier.name], OVER[tier.name])
        assert (fault["log_level"], end["log_level"]) == ("warning", "info")
        assert fault["remedy"].startswith("free space or inodes there")
        assert str(small) in fault["path"]
        assert 0 <= end["count"] <= tier.counts.stores_rejected
        assert end["seconds"] > 0
        assert tier.counts.crashes == 0
    assert of(lines, "2:fs", OVER["2:fs"])[0]["count"] > 8


def test_one_that_is_full_at_the_start_is_said_with_the_remedy_and_healed(tmp_path: Path) -> None:
    """Neither tier can make its folder. The line of the end has what it did not get until then."""
    with tmpfs(tmp_path / "small", "64m") as small, capture_logs() as lines:
        filler = fill(small)
        with engine(small) as facade:
            until(lambda: min(t.counts.cascades_dropped for t in serve(facade)) > 0)
            filler.unlink()
            until(lambda: is_up(facade))
            for tier in facade.statistics().tiers:
                fault, end = of(lines, tier.name, "tier disabled", "tier is back")
                assert "No space left on device" in fault["reason"]
                assert "free space" in fault["reason"].lower()
                assert "None" not in fault["reason"]
                assert 0 < end["blocks_not_stored"] <= tier.counts.cascades_dropped
                assert tier.counts.crashes == 1
    assert not [line for line in lines if line["event"] == "tier is still disabled"]
