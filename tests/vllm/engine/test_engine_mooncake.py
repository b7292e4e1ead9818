"""Two real engines on a Mooncake store whose memory is one engine's, which is killed."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.mooncake_server import OWNERS_EXPIRE, Cluster
from tests.support.patience import until
from tests.vllm.support.play import whole_blocks
from tests.vllm.support.two_engines import LENGTHS, serving, two_serving

if TYPE_CHECKING:
    from pathlib import Path

LOADS_BEGUN = "master_batch_get_replica_list_requests_total"


@pytest.mark.long  # ten seconds, until the master finds out
@pytest.mark.slow
@pytest.mark.one_release
def test_an_engine_that_is_killed_with_its_memory_while_another_loads_is_a_miss(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """``kill -9``, of the engine and its tier. Both have served each other's blocks before.

    It hangs before it is killed, so that the other one's load has begun and can't be done.
    """
    cluster = Cluster(tmp_path, "64MB", *OWNERS_EXPIRE)
    taking: dict[str, Any] = {
        "type": "mooncake",
        "master": cluster.address,
        "local_hostname": "127.0.0.1",
    }
    giving = {**taking, "segment_bytes": "64MB"}
    whole = sum(whole_blocks(LENGTHS))
    try:
        cluster.master.start()
        with two_serving(llama, [giving, taking], 5, log_folder, tmp_path, {}) as two:
            one, other = two.engines
            assert one.tier()["connection"] == "UP"  # before the other one needs its memory
            assert two.both(0, 1) == [0, 0]
            two.until_stored()
            assert two.both(1, 0) == [whole, whole]
            assert two.both(2, 3) == [0, 0]
            two.until_stored()

            begun, kept = (
                cluster.master.count(LOADS_BEGUN),
                cluster.master.count("master_key_count"),
            )
            os.killpg(one.child.pid, signal.SIGSTOP)
            asked = two.ask_one(other, 2, forget=True)
            until(lambda: cluster.master.count(LOADS_BEGUN) > begun)
            one.child.kill()
            assert two.cached_by(other, asked, 2) == 0
            tier = other.tier()
            assert tier["connection"] == "UP", tier
            # Its end refused what was under way, which is a miss; or the time was over before.
            assert tier["counts"]["load_misses"] + tier["counts"]["failed"] > 0, tier
            assert tier["counts"]["damaged"] == 0, tier

            until(lambda: cluster.master.count("master_key_count") < kept)  # the master has noticed
            with serving("again", llama, giving, log_folder, tmp_path, {}) as again:
                assert two.cached_by(again, two.ask_one(again, 4), 4) == 0
                again.until_stored()
                until(lambda: other.tier()["breaker"] != "OPEN")  # it may be tried again
                assert two.cached_by(other, two.ask_one(other, 4), 4) == whole
                assert other.tier()["counts"]["damaged"] == 0
    finally:
        cluster.kill()
