"""The demo's verdict: figures that do not bear out what it says are called so. And its model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtier.tools.demo.__main__ import (
    COLD,
    DRAM,
    PROMPT_TOKENS,
    PROMPTS,
    RESTART,
    save_model,
    table,
    verdict,
)

if TYPE_CHECKING:
    from pathlib import Path

DISK = "disk"
BLOCK_TOKENS, BLOCK_BYTES = 32, 131_072
CACHED = PROMPTS * (PROMPT_TOKENS // BLOCK_TOKENS) * BLOCK_TOKENS
MOVED = CACHED // BLOCK_TOKENS * BLOCK_BYTES


def phase(**moved: int) -> dict[str, Any]:
    """Return one phase's figures; bytes that are not given did not move."""
    counters = ("gpu_to_dram_bytes", "dram_to_gpu_bytes", "dram_to_tier_bytes")
    return {
        "tokens": [[number, 7] for number in range(PROMPTS)],
        "cached_tokens": CACHED,
        "first_token_s": [0.01] * PROMPTS,
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": BLOCK_BYTES,
        "tier_to_dram_bytes": 0,
        **dict.fromkeys(counters, 0),
        **moved,
    }


@pytest.fixture
def phases() -> dict[str, dict[str, Any]]:
    """Return what a run that is all well gives."""
    return {
        COLD: phase(cached_tokens=0, gpu_to_dram_bytes=MOVED, dram_to_tier_bytes=MOVED),
        DRAM: phase(dram_to_gpu_bytes=MOVED),
        DISK: phase(dram_to_gpu_bytes=MOVED, tier_to_dram_bytes=MOVED),
        RESTART: phase(dram_to_gpu_bytes=MOVED, tier_to_dram_bytes=MOVED),
    }


def test_a_good_run_has_no_problems(phases: dict[str, dict[str, Any]]) -> None:
    """And its table has a row a phase, with the tokens at the tier that they came from."""
    assert verdict(phases) == []
    rows = {line.split()[0]: line.split()[3:6] for line in table(phases, DISK).splitlines()[2:6]}
    computed, cached = str(PROMPTS * PROMPT_TOKENS - CACHED), str(CACHED)
    assert rows == {
        COLD: [str(PROMPTS * PROMPT_TOKENS), "0", "0"],
        DRAM: [computed, cached, "0"],
        DISK: [computed, "0", cached],
        RESTART: [computed, "0", cached],
    }


@pytest.mark.parametrize("name", [DRAM, DISK, RESTART])
def test_another_token_is_a_problem(phases: dict[str, dict[str, Any]], name: str) -> None:
    """One wrong token of one prompt is enough."""
    phases[name]["tokens"][3] = [3, 8]
    (problem,) = verdict(phases)
    assert problem == f"{name}: 1 of {PROMPTS} outputs differ from cold"


@pytest.mark.parametrize(
    ("name", "counter", "value"),
    [
        (COLD, "cached_tokens", BLOCK_TOKENS),
        (COLD, "dram_to_tier_bytes", MOVED - BLOCK_BYTES),
        (DRAM, "tier_to_dram_bytes", BLOCK_BYTES),
        (DISK, "tier_to_dram_bytes", 0),
        (RESTART, "tier_to_dram_bytes", MOVED - BLOCK_BYTES),
        (RESTART, "cached_tokens", CACHED - BLOCK_TOKENS),
    ],
)
def test_a_hit_that_is_missing_or_from_elsewhere_is_a_problem(
    phases: dict[str, dict[str, Any]], name: str, counter: str, value: int
) -> None:
    """Each row must be from the tier that it names, all of it."""
    expected = phases[name][counter]
    phases[name][counter] = value
    assert verdict(phases) == [f"{name}: {counter} is {value}, expected {expected}"]


def test_a_folder_with_something_in_it_gets_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is written there would replace another model's files."""
    (tmp_path / "config.json").write_text("{}")
    assert save_model(tmp_path) == 2
    assert f"{tmp_path} is not an empty folder: name another one" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]
