"""vLLM's own ``fs`` tier, hosted by kvtier, in a real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import kvtier_config
from tests.vllm.support.play import assert_at_rest, grown, play, whole_blocks

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [500, 1000, 333, 31]  #: in tokens; the last one is shorter than a block
READ = 'vllm:kv_offload_tiering_read_bytes{tier="1:vllm"}'


def test_a_hosted_tier_gives_a_new_engine_the_same_tokens(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    tiers = [{"type": "vllm", "tier": {"type": "fs", "root_dir": str(tmp_path / "kv")}}]
    cold, again = (
        run_scenario(
            play,
            log_folder=log_folder,
            model=str(llama),
            extra_config=kvtier_config(secondary_tiers=tiers),
            lengths=LENGTHS,
            rounds=1,
        )
        for _ in range(2)
    )
    assert cold[0]["cached"] == [0] * len(LENGTHS)
    assert again[0]["tokens"] == cold[0]["tokens"]
    assert again[0]["cached"] == whole_blocks(LENGTHS)
    blocks = sum(whole_blocks(LENGTHS)) // 32
    assert grown(again, 0, READ) == blocks * again[0]["block_bytes"]
    for rounds in (cold, again):
        assert_at_rest(rounds[0]["statistics"])
