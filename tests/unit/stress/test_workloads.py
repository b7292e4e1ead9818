"""Made-up traces are the same for a seed, and what ``kvtier replay`` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.tools.replay.traces import read_trace
from stress.workloads.__main__ import main, write_trace
from stress.workloads.shapes import BLOCK_TOKENS, SHAPES

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_a_trace_that_is_read_and_shares_prefixes(name: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(name, 2, file)
    trace = read_trace(file, block_tokens=BLOCK_TOKENS)
    references = [block for request in trace.requests for block in request.blocks]
    assert len(trace.requests) > 200
    assert len(references) > 50_000
    assert len(set(references)) < 0.9 * len(references)


def test_a_seed_gives_the_same_traces_again_and_another_gives_others(tmp_path: Path) -> None:
    for number, seed in enumerate((1, 1, 3)):
        assert main([str(tmp_path / str(number)), "--seed", str(seed)]) == 0
    texts = [(tmp_path / str(number) / "moving.jsonl").read_text() for number in range(3)]
    assert texts[0] == texts[1] != texts[2]
    assert len(list((tmp_path / "0").iterdir())) == len(SHAPES)
