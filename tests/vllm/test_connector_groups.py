"""Several KV-cache groups: room is judged and granted for a prefix of tokens across all of them.

vLLM's own connector asks. The prompt needs 24 blocks with full attention and
the last four of a window of 16 tokens: 28 blocks, of which 27 serve 92 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.support.connector import BLOCK_TOKENS, Connector, connector

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WINDOW = 4 * BLOCK_TOKENS
GROUPS = (None, WINDOW)
PROMPTS = {name: range(1000 * n, 1000 * n + 96) for n, name in enumerate("abc")}
SERVED = 92  #: a window's blocks end at 92: the prompt's last token is always computed


@pytest.fixture
def tiers(tmp_path: Path) -> list[dict[str, Any]]:
    """Return a tier that has the blocks of three prompts."""
    tiers: list[dict[str, Any]] = [{"type": "fs", "root_dir": str(tmp_path / "kv")}]
    with connector(slots=1024, windows=GROUPS, secondary_tiers=tiers) as engine:
        for name, prompt in PROMPTS.items():
            assert engine.store(name, prompt) == 28
    return tiers


def start(engine: Connector, *names: str) -> None:
    for name in names:
        engine.start(name, PROMPTS[name])


def read(engine: Connector) -> int:
    """Return how many blocks the tier has read."""
    return int(engine.tier().counts.read_bytes) // int(engine.manager._memory.block_bytes)


def test_a_prompt_that_just_fits_is_served_from_head_to_tail(tiers: list[dict[str, Any]]) -> None:
    """27 blocks were read for 28 slots, and 0 tokens served."""
    with connector(slots=28, windows=GROUPS, secondary_tiers=tiers) as engine:
        start(engine, "a")
        assert engine.match("a") == {"a": SERVED}
        assert read(engine) == 27


def test_what_cannot_be_served_is_not_read(tiers: list[dict[str, Any]]) -> None:
    """The tier has the window of one token only; without it all other blocks are of no use."""
    with connector(slots=27, windows=GROUPS, secondary_tiers=tiers) as engine:
        start(engine, "a")
        assert engine.match("a") == {"a": 0}
        assert read(engine) == 0
        assert engine.primary().promotion_slots == 0


@pytest.mark.parametrize("order", ["abc", "cab"])
def test_prompts_that_do_not_fit_together_do_not_starve_one_another(
    tiers: list[dict[str, Any]], order: Sequence[str]
) -> None:
    """Two such prompts in 40 slots took what the other needed, and a third got nothing either."""
    with connector(slots=40, windows=GROUPS, secondary_tiers=tiers) as engine:
        start(engine, *order)
        found = engine.match(*order)
        served = [name for name, tokens in found.items() if tokens]
        # Who is first depends on whose probes are answered first; the others wait for nobody.
        assert served
        assert set(found.values()) <= {0, SERVED}
        assert read(engine) == 27 * len(served)


def test_prompts_that_fit_together_are_all_served(tiers: list[dict[str, Any]]) -> None:
    with connector(slots=100, windows=GROUPS, secondary_tiers=tiers) as engine:
        start(engine, "a", "b", "c")
        assert engine.match("a", "b", "c") == dict.fromkeys("abc", SERVED)


def test_a_request_that_had_no_room_asks_again_while_it_waits(tiers: list[dict[str, Any]]) -> None:
    """Its turn has not come: once the other has gone there is room."""
    with connector(slots=40, windows=GROUPS, secondary_tiers=tiers) as engine:
        start(engine, "a", "b")
        for _ in range(3):
            engine.matched("a")
            engine.matched("b")
            engine.end_step()
        engine.match("a")
        engine.until(lambda: engine.matched("b") == SERVED)


def test_max_load_tokens_holds_for_all_groups(tiers: list[dict[str, Any]]) -> None:
    """No window was stored that early, so nothing is served, and nothing read."""
    with connector(slots=100, windows=GROUPS, secondary_tiers=tiers) as engine:
        engine.start("a", PROMPTS["a"], max_load_tokens=40)
        assert engine.match("a") == {"a": 0}
        assert read(engine) == 0


def test_two_full_attention_groups_are_cut_at_one_token(tmp_path: Path) -> None:
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "kv")}]
    with connector(slots=1024, windows=(None, None), secondary_tiers=tiers) as engine:
        assert engine.store("a", PROMPTS["a"]) == 48
    with connector(slots=20, windows=(None, None), secondary_tiers=tiers) as engine:
        start(engine, "a")
        assert engine.match("a") == {"a": 9 * BLOCK_TOKENS}
        assert read(engine) == 18


def test_a_store_that_could_never_hit_takes_no_room() -> None:
    """24 + 4 blocks into 20 slots were granted 20 + 0."""
    with connector(slots=20, windows=GROUPS) as engine:
        engine.store("x", range(5000, 5016))
        kept = engine.primary().ready_slots
        assert engine.store("a", PROMPTS["a"]) == 0
        assert engine.primary().counts.stores_dropped == 28
        assert engine.primary().ready_slots == kept, "and nothing is evicted for it"


def test_a_store_is_cut_at_one_token_and_hits() -> None:
    with connector(slots=20, windows=(None, None)) as engine:
        assert engine.store("a", PROMPTS["a"]) == 20
        engine.start("b", PROMPTS["a"])
        assert engine.match("b") == {"b": 10 * BLOCK_TOKENS}
