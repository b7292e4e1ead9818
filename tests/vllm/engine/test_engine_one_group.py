"""One KV-cache group: hits from memory and from disk give the tokens of a recomputation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import Engine, engine, kvtier_config, make_prompts
from tests.vllm.support.play import (
    assert_at_rest,
    grown,
    play,
    play_round,
    prompts_of,
    whole_blocks,
)

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [500, 1000, 333, 64, 31]  #: in tokens; most are no multiple of a block
FS_READ = 'vllm:kv_offload_tiering_read_bytes{tier="1:fs"}'
FS_WRITTEN = 'vllm:kv_offload_tiering_write_bytes{tier="1:fs"}'
FS_HITS = 'vllm:kv_offload_tiering_chunk_hits{tier="1:fs"}'
LOADED = "vllm:kv_offload_load_bytes"
STORED = "vllm:kv_offload_store_bytes"
SKIPPED = "vllm:kv_offload_stores_skipped"


def fs(root: Path) -> list[dict[str, Any]]:
    return [{"type": "fs", "root_dir": str(root)}]


def cold_then_memory_then_corrupted(
    model: str, first: dict[str, Any], second: dict[str, Any] | None, lengths: list[int]
) -> list[dict[str, Any]]:
    """Play three rounds; and with ``second``, one in a second engine of this process."""
    with engine(model, first) as running:
        told = [play_round(running, prompts_of(lengths)) for _ in range(2)]
        invert_every_slot(running)
        told.append(play_round(running, prompts_of(lengths)))
    return told if second is None else told + play(model, second, lengths, rounds=1)


def invert_every_slot(running: Engine) -> None:
    """Damage the primary tier behind kvtier's back."""
    memory = running.manager()._memory
    for slot in range(memory.slot_count):
        view = memory.view(slot)
        view[:] = bytes(byte ^ 0x40 for byte in view) if any(view) else view


@pytest.mark.parametrize(
    ("first", "second", "block_tokens"),
    [
        ({}, None, 32),
        # Three blocks show what two do.
        pytest.param({"block_size": 64}, {"blocks_per_chunk": 2}, 64, marks=pytest.mark.long),
        pytest.param(
            {"blocks_per_chunk": 3, "canonical_layout": True},
            {"block_size": 96},
            96,
            marks=pytest.mark.one_release,
        ),
    ],
    ids=["one-gpu-block", "two-gpu-blocks", "three-canonical"],
)
def test_the_same_tokens_from_memory_and_in_a_new_engine_from_disk(
    llama: Path,
    tmp_path: Path,
    log_folder: Path,
    first: dict[str, Any],
    second: dict[str, Any] | None,
    block_tokens: int,
) -> None:
    """Hits cover all whole blocks, each byte is counted, and a damaged byte shows.

    ``block_size`` and ``blocks_per_chunk`` are two names of one thing, so the
    second engine, which uses the other one, finds the first one's blocks.
    """
    first = kvtier_config(secondary_tiers=fs(tmp_path / "kv"), **first)
    if second is not None:
        kept = {key: first[key] for key in first if key not in ("block_size", "blocks_per_chunk")}
        second = {**kept, **second}
    rounds = run_scenario(
        cold_then_memory_then_corrupted,
        log_folder=log_folder,
        model=str(llama),
        first=first,
        second=second,
        lengths=LENGTHS,
    )
    if second is None:  # a new process
        rounds += run_scenario(
            play,
            log_folder=log_folder,
            model=str(llama),
            extra_config=first,
            lengths=LENGTHS,
            rounds=1,
        )
    cold, memory, corrupted, disk = rounds
    expected = whole_blocks(LENGTHS, block_tokens)
    size = sum(expected) // block_tokens * cold["block_bytes"]
    assert cold["cached"] == [0] * len(LENGTHS)
    assert memory["cached"] == expected
    assert memory["tokens"] == cold["tokens"]
    assert grown(rounds, 0, STORED) == grown(rounds, 0, FS_WRITTEN) == size
    assert grown(rounds, 1, LOADED) == size
    assert grown(rounds, 1, FS_READ) == 0
    assert_at_rest(memory["statistics"])

    # Without this, "the same tokens" might be something that can't fail.
    assert corrupted["cached"] == expected
    assert corrupted["tokens"][1] != cold["tokens"][1]
    assert corrupted["tokens"][-1] == cold["tokens"][-1]  # shorter than a block, so never loaded

    assert disk["tokens"] == cold["tokens"]
    assert disk["cached"] == expected
    assert disk["metrics"][FS_READ] == disk["metrics"][LOADED] == size
    assert disk["metrics"][FS_HITS] == size / disk["block_bytes"]
    assert disk["metrics"].get(STORED, 0) == 0  # nothing was computed that is worth storing
    assert_at_rest(disk["statistics"])


def small_memory(
    model: str, root: str, lengths: list[int], slots: int
) -> dict[str, list[dict[str, Any]]]:
    tiers = [{"type": "fs", "root_dir": root}]
    full = play(model, kvtier_config(secondary_tiers=tiers), lengths, rounds=1)
    size = slots * full[0]["block_bytes"]
    small = kvtier_config(secondary_tiers=tiers, cpu_bytes_to_use=size)
    return {"full": full, "small": play(model, small, lengths, rounds=2)}


@pytest.mark.one_release
def test_a_prefix_larger_than_memory_is_served_partly(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Promise 11: vLLM's own manager answers it with a miss. All of it reaches the disk, too."""
    slots = 20
    told = run_scenario(
        small_memory,
        log_folder=log_folder,
        model=str(llama),
        root=str(tmp_path / "kv"),
        lengths=[1000, 1500],
        slots=slots,
    )
    (cold,) = told["full"]
    for partial in told["small"]:
        assert partial["tokens"] == cold["tokens"]
        for cached in partial["cached"]:
            assert 0 < cached <= slots * 32
        assert partial["statistics"]["primary"]["slot_count"] == slots
        assert_at_rest(partial["statistics"])
    served = sum(told["small"][0]["cached"]) // 32 * cold["block_bytes"]
    assert told["small"][0]["metrics"][FS_READ] == served


def stored_on_second_sight(model: str, lengths: list[int]) -> list[dict[str, Any]]:
    return play(model, kvtier_config(store_threshold=2), lengths, rounds=3)


def test_store_threshold_stores_what_is_seen_twice(llama: Path, log_folder: Path) -> None:
    """vLLM's tiering refuses the key; its own count of skipped stores tells."""
    rounds = run_scenario(
        stored_on_second_sight, log_folder=log_folder, model=str(llama), lengths=LENGTHS
    )
    blocks = sum(whole_blocks(LENGTHS)) // 32
    size = blocks * rounds[0]["block_bytes"]
    assert [grown(rounds, number, STORED) for number in range(3)] == [0, size, 0]
    assert [grown(rounds, number, SKIPPED) for number in range(3)] == [blocks, 0, 0]
    assert [sum(each["cached"]) for each in rounds] == [0, 0, blocks * 32]
    assert rounds[0]["tokens"] == rounds[1]["tokens"] == rounds[2]["tokens"]
    assert_at_rest(rounds[2]["statistics"])


def second_turn(model: str, prompt_tokens: int, answer_tokens: int) -> dict[str, Any]:
    """Continue a conversation: the second prompt is the first one and its answer."""
    told: dict[str, Any] = {}
    (prompt,) = make_prompts(1, prompt_tokens)
    for name, prompt_only in (("prompt", True), ("all", False)):
        with engine(model, kvtier_config(offload_prompt_only=prompt_only)) as running:
            first = play_round(running, [prompt], max_tokens=answer_tokens)
            longer = [*prompt, *first["tokens"][0], 5, 6, 7]
            cached = play_round(running, [longer])
            running.forget()
            running.manager().facade.reset()
            running.manager().facade.on_reset_flushed()
            told[name] = [first, cached, play_round(running, [longer])]
    return told


def test_decoded_blocks_are_stored_unless_only_prompts_are_wanted(
    llama: Path, log_folder: Path
) -> None:
    """``offload_prompt_only: false``: the answer's blocks serve the next turn."""
    told = run_scenario(
        second_turn, log_folder=log_folder, model=str(llama), prompt_tokens=70, answer_tokens=80
    )
    for name, blocks in (("prompt", 2), ("all", 4)):  # 150 tokens, the last one never computed
        first, again, recomputed = told[name]
        assert first["metrics"][STORED] == blocks * first["block_bytes"]
        assert again["cached"] == [blocks * 32]
        assert recomputed["cached"] == [0]
        assert again["tokens"] == recomputed["tokens"]
    assert told["all"][0]["tokens"] == told["prompt"][0]["tokens"]
