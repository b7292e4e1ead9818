"""Buckets that refuse writes or whose keys end, and masters that are elected, under engines.

Two engines on one storage: what one has stored, the other serves, so that each hit is the tier's.
Each answer is compared with that of an engine without offloading.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import s3_server
from tests.support.mooncake_server import ElectedMasters
from tests.support.patience import PATIENCE_S, until
from tests.support.redis_servers import HOST
from tests.support.s3_rights import SERVERS, bucket_on
from tests.vllm.support.play import whole_blocks
from tests.vllm.support.two_engines import LENGTHS, serving, two_serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.s3_rights import Bucket
    from tests.vllm.support.two_engines import Serving, Two

WHOLE = sum(whole_blocks(LENGTHS))
# Each is five processes of vLLM, one after the other or side by side.
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.one_release]


def store_and_serve(two: Two, first: int, second: int) -> None:
    """Have each engine compute a part, and load the other's."""
    assert two.both(first, second) == [0, 0]
    two.until_stored()
    assert two.both(second, first) == [WHOLE, WHOLE]


def until_used_again(two: Two, connected: Callable[[], bool]) -> None:
    """Have the engines step until they are connected where they should be, and their tier is up."""
    until(
        lambda: all(is_in_use(engine) for engine in two.engines) and connected(),
        lambda: [engine.tier() for engine in two.engines],
    )


def is_in_use(engine: Serving) -> bool:
    """Tell whether it may load from its tier; stores may fail."""
    tier = engine.tier()
    return (tier["breakers"]["loads"], tier["connection"]) == ("CLOSED", "UP")


def until_stores_fail(two: Two) -> None:
    """Have the engines step until each has been refused."""
    until(lambda: all(engine.tier()["breaker"] != "CLOSED" for engine in two.engines))


def until_stores_work(two: Two) -> None:
    """Have the engines step until what was deferred has been stored, or some of it."""
    until(lambda: all(engine.tier()["breaker"] == "CLOSED" for engine in two.engines))


def nothing_was_damaged(two: Two) -> None:
    for engine in two.engines:
        assert engine.tier()["counts"]["damaged"] == 0


@pytest.mark.parametrize("server", SERVERS)
def test_a_bucket_refuses_writes_and_its_keys_end(
    server: str, llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """By moto's and Ceph's policies; one that misbehaves stands for tokens that expire."""
    file = tmp_path / "keys.json"

    def write_keys(bucket: Bucket) -> None:
        access, secret = bucket.keys
        keys = {"Version": 1, "AccessKeyId": access, "SecretAccessKey": secret}
        file.write_text(json.dumps(keys))

    with bucket_on(server, tmp_path) as bucket, ExitStack() as running:
        write_keys(bucket)
        tier: dict[str, Any] = s3_server.options_for(
            bucket.endpoint,
            "kv",
            type="s3",
            access_key_env=None,
            secret_key_env=None,
            credentials_command=f"cat {file}",
            request_timeout_s=PATIENCE_S,
        )
        two = running.enter_context(two_serving(llama, [tier] * 2, 6, log_folder, tmp_path, {}))
        store_and_serve(two, 0, 1)

        bucket.refuse_writes()
        assert two.both(2, 3) == [0, 0]
        until_stores_fail(two)
        third = running.enter_context(serving("third", llama, tier, log_folder, tmp_path, {}))
        assert two.cached_by(third, two.ask_one(third, 0), 0) == WHOLE
        assert all(is_in_use(engine) for engine in (*two.engines, third))
        bucket.take_writes()
        until_stores_work(two)
        store_and_serve(two, 4, 5)

        bucket.end_keys()
        assert two.both(4, 5) == [WHOLE, WHOLE]  # of host memory
        assert two.cached_by(third, two.ask_one(third, 1), 1) == 0
        until(lambda: not is_in_use(third))
        bucket.renew_keys()
        write_keys(bucket)
        until_used_again(two, lambda: is_in_use(third))
        assert two.cached_by(third, two.ask_one(third, 4), 4) == WHOLE
        nothing_was_damaged(two)


def test_another_master_of_mooncake_is_elected(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """It knows none of the blocks that were there: they are computed, and stored anew."""
    masters = ElectedMasters(tmp_path)
    tier = {"type": "mooncake", "master": masters.address, "local_hostname": HOST}
    try:
        masters.start()
        with two_serving(llama, [tier] * 2, 6, log_folder, tmp_path, {}) as two:
            store_and_serve(two, 0, 1)

            masters.kill_the_first()
            assert two.both(2, 3) == [0, 0]
            until(lambda: not all(is_in_use(engine) for engine in two.engines))
            until_used_again(two, masters.second_has_memory)
            until_stores_work(two)
            store_and_serve(two, 4, 5)
            with serving("third", llama, tier, log_folder, tmp_path, {}) as third:
                assert two.cached_by(third, two.ask_one(third, 4), 4) == WHOLE
                assert two.cached_by(third, two.ask_one(third, 0), 0) == 0
            nothing_was_damaged(two)
    finally:
        masters.kill()
