"""A whole runtime: real cells, real threads, the real ``fs`` backend."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from kvtier import ConfigError, Namespace, RuntimeConfig, SlotMemory, open_runtime, runtime
from kvtier.hosts import thread_host
from kvtier.tier.unbounded_tier import UnboundedTier
from tests.support.fuse_folder import fuse_folder
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtier import SchedulerFacade

BLOCK_BYTES = 4096
SLOTS = 4
PATIENT = dict.fromkeys(("probe_timeout_s", "promote_timeout_s", "store_timeout_s"), PATIENCE_S)
KEYS = [bytes([number]) * 32 + bytes(4) for number in range(SLOTS)]


class Runtime:
    """A runtime over one ``fs`` tier, and what a scheduler and its GPU would do with it."""

    def __init__(self, root: Path, *, collect_events: bool = False, **settings: object) -> None:
        config = RuntimeConfig.from_mapping(
            {
                "cascade_slots_fraction_max": 1.0,
                "secondary_tiers": [
                    {
                        "type": "fs",
                        "root_dir": str(root),
                        "isolation": "thread",  # where patches hold
                        "n_read_threads": 2,
                        **PATIENT,
                    }
                ],
                **settings,
            },
            slot_count=SLOTS,
            block_bytes=BLOCK_BYTES,
        )
        self.memory = SlotMemory.anonymous(SLOTS, BLOCK_BYTES)
        self.facade: SchedulerFacade = open_runtime(
            config, self.memory, Namespace({"model": "m"}), collect_events=collect_events
        )

    def until(self, done: Callable[[], object]) -> None:
        """Step until ``done()``; threads of tiers run between the steps."""

        def is_done() -> bool:
            if done():
                return True
            self.facade.step_end()
            return False

        until(is_done, self.facade.statistics)

    def store(self, keys: list[bytes]) -> None:
        self.facade.on_request_started("writer")
        grant = self.facade.prepare_store(keys, "writer")
        assert grant is not None
        for key, slot in zip(grant.keys, grant.slots, strict=True):
            self.memory.view(slot)[:] = key[:1] * BLOCK_BYTES
        self.facade.complete_store(grant.keys, "writer")
        self.facade.on_request_finished("writer")
        self.until(lambda: not self.facade.has_pending_work())

    def hits(self, keys: list[bytes], request: str) -> int:
        """Return how many blocks are served, all of them with their own bytes."""
        self.facade.on_request_started(request)
        self.until(lambda: self.facade.lookup_prefix(keys, request) is not None)
        found = self.facade.lookup_prefix(keys, request)
        assert found is not None
        slots = self.facade.prepare_load(keys[:found], request)
        for key, slot in zip(keys, slots, strict=False):
            assert self.memory.view(slot) == key[:1] * BLOCK_BYTES
        self.facade.complete_load(keys[:found], request)
        self.facade.on_request_finished(request)
        return found


def test_blocks_survive_the_runtime_that_stored_them(tmp_path: Path) -> None:
    first = Runtime(tmp_path / "kv")
    first.store(KEYS)
    assert first.facade.close() is True
    first.memory.release()
    second = Runtime(tmp_path / "kv")
    assert second.hits(KEYS[:3], "r") == 3
    assert second.facade.close() is True


@needs("fuse")
def test_closing_over_a_hung_read_says_that_the_memory_is_in_use(tmp_path: Path) -> None:
    """The read may end much later, and write into a slot: it must still be there."""
    with fuse_folder(tmp_path) as folder:
        first = Runtime(folder.path / "kv")
        first.store(KEYS[:1])
        first.facade.close()
        second = Runtime(folder.path / "kv", close_timeout_s=0.2)
        folder.hang("read")
        second.facade.on_request_started("r")
        second.until(lambda: second.facade.lookup(KEYS[0], "r") is None and folder.waiting)
        assert second.facade.close() is False
        folder.heal()


def test_a_tier_that_broke_serves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fresh actors and a fresh backend: a closed one's threads are gone."""
    monkeypatch.setattr(thread_host, "RESTART_PAUSE_S", 0.001)
    monkeypatch.setattr(thread_host, "QUIET_POLL_S", 0.001)
    runtime = Runtime(tmp_path / "kv", on_reset="keep")
    runtime.store(KEYS[:2])

    def broken(_self: UnboundedTier) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(UnboundedTier, "_start_batches", broken)
        runtime.facade.reset()
        assert runtime.hits(KEYS[:1], "while it breaks") == 0
        runtime.until(lambda: runtime.facade.statistics().tiers[0].counts.crashes)
    runtime.until(lambda: runtime.facade.statistics().tiers[0].breaker == "CLOSED")
    assert runtime.hits(KEYS[:2], "after it") == 2
    assert runtime.facade.statistics().primary.quarantined_slots == 0
    assert runtime.facade.close() is True


def test_memory_that_does_not_fit_is_refused() -> None:
    config = RuntimeConfig(slot_count=2, block_bytes=BLOCK_BYTES)
    with pytest.raises(ConfigError, match=r"memory of 4 slots .* does not fit slot_count=2"):
        open_runtime(config, SlotMemory.anonymous(4, BLOCK_BYTES), Namespace({}))


def test_a_tier_in_a_process_answers_though_no_step_ends(tmp_path: Path) -> None:
    disk = {"type": "disk", "path": str(tmp_path / "kv"), "capacity_bytes": 4 << 20}
    tiers = [disk | PATIENT]
    runtime = Runtime(tmp_path, secondary_tiers=tiers, on_reset="keep")
    runtime.store(KEYS)
    facade = runtime.facade
    facade.reset()
    facade.on_reset_flushed()
    facade.on_request_started("r")
    until(lambda: facade.lookup_prefix(KEYS[:3], "r") is not None)
    assert facade.lookup_prefix(KEYS[:3], "r") == 3
    assert facade.close() is True


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("raised_by", ["SchedulerFacade", "Generations"])
def test_a_start_that_is_interrupted_keeps_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str, raised_by: str
) -> None:
    """The tiers run by then. The next start in the process would be refused."""
    tier = {"type": "disk", "path": str(tmp_path / "kv"), "capacity_bytes": "64MB"}
    tiers = {"secondary_tiers": [{**tier, "isolation": isolation}]}
    with monkeypatch.context() as patch:
        patch.setattr(runtime, raised_by, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            Runtime(tmp_path, **tiers)
    assert Runtime(tmp_path, **tiers).facade.close() is True
