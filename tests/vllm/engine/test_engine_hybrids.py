"""Models whose groups differ in kind, and drafts: a restart costs no hits and changes no tokens.

What a group's blocks are needed for depends on its kind: a window looks back a limited way, a
state is one block, and all other layers need every block. An engine that has just started
finds in its tiers what the engine before it would have found in DRAM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import Engine, engine, kvtier_config
from tests.vllm.support.models import (
    make_eagle_head,
    make_gemma,
    make_gpt_oss,
    make_granite,
    make_lfm2,
    make_llama,
)
from tests.vllm.support.play import assert_at_rest, play_round, prompts_of, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: In tokens. One is computed behind the first hit, and two are behind the last: what a
#: restored state is wrong in is soon seen.
LENGTHS = [705, 400, 130]
STATES = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}
ATTENTION = "FullAttentionSpec"
WINDOW = "SlidingWindowSpec"
STATE = "MambaSpec"


def cold_memory_restart(
    model: str, tier: dict[str, Any], lengths: list[int], settings: dict[str, Any]
) -> dict[str, Any]:
    """Play cold and from DRAM, then in a new engine, which has nothing in DRAM."""
    config = kvtier_config(secondary_tiers=[tier])
    prompts = prompts_of(lengths)
    rounds = []
    for count in (2, 1):
        with engine(model, config, blocks=160, **settings) as running:
            groups, ahead = groups_of(running), blocks_ahead(running)
            rounds += [play_round(running, prompts) for _ in range(count)]
    return {"groups": groups, "blocks_ahead": ahead, "rounds": rounds}


def groups_of(running: Engine) -> list[list[Any]]:
    """Return kind, block size and number of layers of each of vLLM's KV-cache groups."""
    return [
        [
            type(group.kv_cache_spec).__name__,
            group.kv_cache_spec.block_size,
            len(group.layer_names),
        ]
        for group in running.core().scheduler.kv_cache_config.kv_cache_groups
    ]


def blocks_ahead(running: Engine) -> int:
    """Return how many blocks behind a hit vLLM wants, too: 0.33 does for an EAGLE head."""
    configs = running.connector().connector_scheduler.config.kv_group_configs
    return int(any(config.is_eagle_group for config in configs))


def make_window_of_a_block(folder: Path) -> Path:
    return make_gemma(folder, window=32)


MODELS: list[Any] = [
    # vLLM asks for a window of one block as it asks for the head of a prompt.
    pytest.param(
        make_window_of_a_block,
        [[WINDOW, 32, 2], [ATTENTION, 32, 2]],
        {},
        id="window-of-one-block",
    ),
    pytest.param(make_lfm2, [[STATE, 32, 2], [ATTENTION, 32, 2]], STATES, id="lfm2"),
    # A state of another kind, in blocks of another size: once in a while is enough.
    pytest.param(
        make_granite,
        [[STATE, 64, 2], [ATTENTION, 64, 2]],
        # vLLM's CPU code can keep the state at the end of a step only, not those before it.
        STATES | {"max_num_batched_tokens": 64},
        id="granite",
        marks=pytest.mark.long,
    ),
    # To kvtier it is as the Gemma 3 that is always played.
    pytest.param(
        make_gpt_oss,
        [[WINDOW, 32, 2], [ATTENTION, 32, 2]],
        {},
        id="gpt-oss",
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize(("make_model", "groups", "settings"), MODELS)
def test_a_restart_costs_a_hybrid_model_no_hits(
    make_model: Callable[[Path], Path],
    groups: list[list[Any]],
    settings: dict[str, Any],
    tmp_path: Path,
    log_folder: Path,
) -> None:
    """A tier that takes a group for one of another kind asks for blocks that nobody has."""
    told = run_scenario(
        cold_memory_restart,
        log_folder=log_folder,
        model=str(make_model(tmp_path / "model")),
        tier={"type": "fs", "root_dir": str(tmp_path / "kv")},
        lengths=LENGTHS,
        settings=settings,
    )
    assert_same(told, groups)


def refused(model: str) -> str:
    try:
        with engine(model, kvtier_config(blocks_per_chunk=2), blocks=160):
            return "it started"
    except Exception as error:  # noqa: BLE001 - vLLM may wrap it
        return repr(error)


def test_blocks_of_several_vllm_blocks_are_refused_beside_a_window(
    gemma: Path, log_folder: Path
) -> None:
    """vLLM would store them with holes, and a later request would load what nobody wrote."""
    told = run_scenario(refused, log_folder=log_folder, model=str(gemma))
    assert "blocks of 2 vLLM blocks" in told
    assert "Leave both keys out" in told


def make_draft(folder: Path) -> Path:
    return make_llama(folder, num_hidden_layers=1)


@pytest.mark.parametrize(
    ("method", "make_head"),
    [
        # Of the same kind as the layers of the model: to kvtier it is a deeper Llama.
        pytest.param("draft_model", make_draft, marks=pytest.mark.long),
        ("eagle", make_eagle_head),
    ],
)
def test_a_restart_costs_a_model_with_a_draft_no_hits(
    method: str,
    make_head: Callable[[Path], Path],
    llama: Path,
    tmp_path: Path,
    log_folder: Path,
) -> None:
    """The draft's layers are in the blocks, too."""
    told = run_scenario(
        cold_memory_restart,
        log_folder=log_folder,
        model=str(llama),
        tier={
            "type": "disk",
            "path": str(tmp_path / "disk"),
            "capacity_bytes": 64 << 20,
        },
        lengths=LENGTHS,
        settings={
            "speculative_config": {
                "model": str(make_head(tmp_path / "head")),
                "method": method,
                "num_speculative_tokens": 3,
            }
        },
    )
    assert_same(told, [[ATTENTION, 32, 5]])


def assert_same(told: dict[str, Any], groups: list[list[Any]]) -> None:
    """Check that DRAM and the tier gave all that they could, and the tokens of the cold round."""
    cold, memory, restarted = told["rounds"]
    assert told["groups"] == groups
    assert cold["cached"] == [0] * len(LENGTHS)
    block_tokens = groups[0][1]
    not_hit = block_tokens * told["blocks_ahead"]
    for hits in (memory, restarted):
        assert hits["cached"] == [n - not_hit for n in whole_blocks(LENGTHS, block_tokens)]
        assert hits["tokens"] == cold["tokens"]
        assert_at_rest(hits["statistics"])


def two_turns(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Ask, and ask on from the answer."""
    with engine(model, kvtier_config(offload_prompt_only=False), blocks=160, **settings) as running:
        (prompt,) = prompts_of([100])
        first = play_round(running, [prompt], 190)
        asked = [*prompt, *first["tokens"][0], *prompts_of([20], seed=5)[0]]
        return {"turn": play_round(running, [asked]), "groups": groups_of(running)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("make_model", "settings", "loaded"), [(make_lfm2, STATES, 96), (make_llama, {}, 288)]
)
def test_an_answer_of_a_model_with_states_is_computed_again_in_the_next_turn(
    make_model: Callable[[Path], Path],
    settings: dict[str, Any],
    loaded: int,
    tmp_path: Path,
    log_folder: Path,
) -> None:
    """As ``vllm-releases.md`` says: vLLM's connector stores no states of what is generated."""
    told = run_scenario(
        two_turns,
        log_folder=log_folder,
        model=str(make_model(tmp_path / "model")),
        settings=settings,
    )
    assert told["turn"]["cached"] == [loaded]
