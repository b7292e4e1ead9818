"""vLLM's own ``fs`` and ``obj`` tiers, hosted by kvtier, in real engines; ``obj`` over moto."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.needs import require
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, client_for, moto_server
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import kvtier_config
from tests.vllm.support.play import assert_at_rest, grown, play, whole_blocks

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [500, 1000, 333, 31]  #: in tokens; the last one is shorter than a block
READ = 'vllm:kv_offload_tiering_read_bytes{tier="1:vllm"}'


BESIDE_OBJ = {"NIXL_TELEMETRY_ENABLE": "y"}  #: docs/how-to/host-vllms-tiers.md says why


def on_moto(endpoint: str) -> dict[str, Any]:
    """Return vLLM's ``obj`` tier in a bucket of this server's."""
    store = {
        "bucket": BUCKET,
        "endpoint_override": endpoint,
        "scheme": "http",
        "access_key": ACCESS_KEY,
        "secret_key": SECRET_KEY,
    }
    return {"type": "obj", "store_config": store}


@pytest.mark.parametrize("kind", ["fs", pytest.param("obj", marks=pytest.mark.one_release)])
def test_a_hosted_tier_gives_a_new_engine_the_same_tokens(
    kind: str, llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    if kind == "obj":
        require("object stores of NIXL")
    with moto_server() if kind == "obj" else nullcontext() as server:
        folder = {"type": "fs", "root_dir": str(tmp_path / "kv")}
        tier = folder if server is None else on_moto(server.endpoint)
        cold, again = (
            run_scenario(
                play,
                log_folder=log_folder,
                environment=BESIDE_OBJ,
                model=str(llama),
                extra_config=kvtier_config(secondary_tiers=[{"type": "vllm", "tier": tier}]),
                lengths=LENGTHS,
                rounds=1,
            )
            for _ in range(2)
        )
        if server is not None:
            found = client_for(server.endpoint).list_objects_v2(Bucket=BUCKET)["Contents"]
            assert {each["Size"] for each in found} == {cold[0]["block_bytes"]}
    assert cold[0]["cached"] == [0] * len(LENGTHS)
    assert again[0]["tokens"] == cold[0]["tokens"]
    assert again[0]["cached"] == whole_blocks(LENGTHS)
    blocks = sum(whole_blocks(LENGTHS)) // 32
    assert grown(again, 0, READ) == blocks * again[0]["block_bytes"]
    for rounds in (cold, again):
        assert_at_rest(rounds[0]["statistics"])
