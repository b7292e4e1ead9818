"""What is promoted for a request: no more than it may load, and no longer than it waits.

vLLM's own connector decides; a tier's reads and the slots that promotions hold tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.support.connector import BLOCK_TOKENS, Connector, connector

if TYPE_CHECKING:
    from pathlib import Path

SLOTS = 32
HELD_MAX = 30  #: what the reserve for stores leaves to promotions
ONE = range(40 * BLOCK_TOKENS)
OTHER = range(1000, 1000 + 20 * BLOCK_TOKENS)


@pytest.fixture
def tiers(tmp_path: Path) -> list[dict[str, Any]]:
    """Return a tier that has the blocks of two prompts."""
    tiers: list[dict[str, Any]] = [{"type": "fs", "root_dir": str(tmp_path / "kv")}]
    with connector(slots=1024, secondary_tiers=tiers) as engine:
        assert engine.store("one", ONE) == 40
        assert engine.store("other", OTHER) == 20
    return tiers


def promote(engine: Connector, name: str, blocks: int) -> None:
    """Have a waiting request look up until so many blocks are promoted for it."""

    def is_promoted() -> bool:
        engine.matched(name)
        seen = engine.primary()
        return bool(seen.promotion_slots == blocks and not seen.filling_from_tiers_slots)

    engine.until(is_promoted)


def test_a_request_that_is_scheduled_without_a_load_gives_its_blocks_back(
    tiers: list[dict[str, Any]],
) -> None:
    """Another connector brought its KV. It held 30 of 32 slots until it ended, or for 60 s."""
    with connector(slots=SLOTS, secondary_tiers=tiers) as engine:
        engine.start("one", [*ONE, 1])
        promote(engine, "one", HELD_MAX)
        engine.end_step()
        assert engine.primary().promotion_slots == HELD_MAX, "it waits, and keeps them"
        stored = engine.end_step(["one"])
        assert engine.primary().promotion_slots == 0
        engine.complete(stored)
        engine.start("other", [*OTHER, 1])
        assert engine.match("other") == {"other": len(OTHER)}


def test_a_request_that_is_resumed_without_a_load_gives_its_blocks_back(
    tiers: list[dict[str, Any]],
) -> None:
    """vLLM names only those that run for the first time; a resumed one shows when it stores."""
    with connector(slots=SLOTS, secondary_tiers=tiers) as engine:
        engine.start("one", [*ONE, 1])
        promote(engine, "one", HELD_MAX)
        engine.complete(engine.end_step(["one"], resumed=["one"]))
        assert engine.primary().promotion_slots == 0


def test_a_load_ends_the_leases_on_what_was_not_loaded(tiers: list[dict[str, Any]]) -> None:
    """A hybrid's other group, or vLLM's scheduler, may have allowed fewer tokens."""
    with connector(slots=SLOTS, secondary_tiers=tiers) as engine:
        engine.start("other", [*OTHER, 1])
        promote(engine, "other", 20)
        assert engine.matched("other") == len(OTHER)
        engine.load("other", 2 * BLOCK_TOKENS)
        engine.end_step()
        assert engine.primary().promotion_slots == 0
        assert engine.primary().pinned_slots == 2


def test_those_that_wait_keep_their_blocks_when_another_is_scheduled(
    tiers: list[dict[str, Any]],
) -> None:
    with connector(slots=64, secondary_tiers=tiers) as engine:
        engine.start("one", [*ONE, 1])
        engine.start("other", [*OTHER, 1])
        promote(engine, "one", 40)
        promote(engine, "other", 60)
        engine.complete(engine.end_step(["one"]))
        assert engine.primary().promotion_slots == 20
        assert engine.match("other") == {"other": len(OTHER)}


@pytest.mark.parametrize(("cap", "blocks"), [(8, 2), (11, 2), (3, 1), (4, 1), (10**6, 20)])
def test_no_more_is_read_than_max_load_tokens_allows(
    tiers: list[dict[str, Any]], cap: int, blocks: int
) -> None:
    """With a cap of 8 tokens (2 blocks) it read 250 blocks. Less than a block is not asked for."""
    with connector(slots=256, secondary_tiers=tiers) as engine:
        engine.start("other", [*OTHER, 1], max_load_tokens=cap)
        served = min(cap, len(OTHER)) // BLOCK_TOKENS * BLOCK_TOKENS
        assert engine.match("other") == {"other": served}
        engine.settle()
        read = engine.tier().counts.read_bytes // engine.manager._memory.block_bytes
        assert read == (blocks if served else 0)
        assert engine.tier().counts.queries == (blocks if served else 0)
