"""A rolling update: the new engine starts beside the old one, which has its folder till it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from kvtier import ConfigError, Namespace, RuntimeConfig, SlotMemory, open_runtime
from tests.support.patience import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCK_BYTES = 4096
SLOTS = 8
KEYS = [bytes([number]) * 32 + bytes(4) for number in range(SLOTS)]
PATIENT = dict.fromkeys(("probe_timeout_s", "promote_timeout_s", "store_timeout_s"), PATIENCE_S)


class Engine:
    """A runtime over one ``disk`` tier, and what a scheduler does with it."""

    def __init__(self, path: Path, **options: Any) -> None:
        tier = {"type": "disk", "path": str(path), "capacity_bytes": 2 << 20, **PATIENT, **options}
        config = RuntimeConfig.from_mapping(
            {"cascade_slots_fraction_max": 1.0, "secondary_tiers": [tier]},
            slot_count=SLOTS,
            block_bytes=BLOCK_BYTES,
        )
        self.memory = SlotMemory.anonymous(SLOTS, BLOCK_BYTES)
        self.facade = open_runtime(config, self.memory, Namespace({"model": "m"}))

    def step_until(self, done: Callable[[], object]) -> None:
        def is_done() -> bool:
            self.facade.step_end()
            return bool(done())

        until(is_done, self.facade.statistics)

    def store(self) -> None:
        self.facade.on_request_started("writer")
        grant = self.facade.prepare_store(KEYS, "writer")
        assert grant is not None
        for key, slot in zip(grant.keys, grant.slots, strict=True):
            self.memory.view(slot)[:] = key[:1] * BLOCK_BYTES
        self.facade.complete_store(grant.keys, "writer")
        self.facade.on_request_finished("writer")
        self.step_until(lambda: not self.facade.has_pending_work())

    def serves(self) -> bool:
        """Tell whether all blocks are found and right."""
        self.facade.on_request_started("reader")
        self.step_until(lambda: self.facade.lookup_prefix(KEYS, "reader") is not None)
        found = self.facade.lookup_prefix(KEYS, "reader")
        if found:
            slots = self.facade.prepare_load(KEYS[:found], "reader")
            for key, slot in zip(KEYS, slots, strict=False):
                assert self.memory.view(slot) == key[:1] * BLOCK_BYTES
            self.facade.complete_load(KEYS[:found], "reader")
        self.facade.on_request_finished("reader")
        return found == len(KEYS)


@pytest.mark.parametrize("cell", ["process", "thread"])
def test_the_new_engine_starts_without_the_folder_and_takes_it_over(
    cell: str, tmp_path: Path
) -> None:
    """Kubernetes keeps the old pod until the new one is ready: refused, it never would be."""
    old = Engine(tmp_path / "kv", isolation=cell)
    old.store()
    with capture_logs() as lines:
        new = Engine(tmp_path / "kv", isolation=cell, on_unusable="skip")
    assert any("is in use by" in str(line) for line in lines), "it says who has it"
    assert new.facade.statistics().tiers[0].breaker == "DISABLED"
    assert not new.serves()
    assert old.serves(), "the old one goes on"
    old.facade.close()
    new.step_until(lambda: new.facade.statistics().tiers[0].breaker == "CLOSED")
    new.step_until(new.serves)
    new.facade.close()


def test_a_refusal_of_a_folder_in_use_names_the_way_out(tmp_path: Path) -> None:
    old = Engine(tmp_path / "kv", isolation="thread")
    with pytest.raises(ConfigError, match=r"is in use by .* set on_unusable='skip'"):
        Engine(tmp_path / "kv", isolation="thread")
    old.facade.close()
