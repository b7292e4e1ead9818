"""Several engines over one storage: what one has stored, another serves, token for token.

One engine stores in all of them: a shared folder, a Valkey server, an S3 server and a Mooncake
store. Another process's engines each find it in one. ``make test-long`` has engines over a whole
Ceph as well, two that share while both serve, and one rank beside two.
"""

from __future__ import annotations

import json
import re
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import valkey

from tests.support import mooncake_server, redis_servers, s3_server
from tests.support.ceph_server import ceph_server
from tests.support.patience import PATIENCE_S, until
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.play import assert_at_rest, play, play_round, prompts_of, whole_blocks
from tests.vllm.support.two_engines import LENGTHS, two_serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BLOCKS = sum(whole_blocks(LENGTHS)) // 32
SHARED = ("fs", "redis", "s3", "mooncake")
KEYS = {"TEST_KEY": secrets.token_hex(32), "TEST_OTHER_KEY": secrets.token_hex(32)}
CREDENTIALS = {
    "KVTIER_TEST_ACCESS_KEY": s3_server.ACCESS_KEY,
    "KVTIER_TEST_SECRET_KEY": s3_server.SECRET_KEY,
}
ENVIRONMENT = {**KEYS, **CREDENTIALS}
SIGNED = {"auth_key_env": "TEST_KEY"}
UP, GONE = 0.0, 2.0


def redis(server: redis_servers.RedisServer, **options: Any) -> dict[str, Any]:
    patient = {"connect_timeout_s": PATIENCE_S, "call_timeout_s": PATIENCE_S}
    return {"type": "redis", "url": server.url, **patient, **options}


def tokens_of(model: str, lengths: list[int], seed: int = 7) -> list[list[int]]:
    """Return what an engine without offloading answers."""
    with engine(model, None) as running:
        return running.run_one_by_one(prompts_of(lengths, seed)).tokens


# --- engines one after the other ---


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """Run the servers; return the tiers on them, and a folder whose blocks are signed."""
    folder = tmp_path_factory.mktemp("shared")
    with ExitStack() as running:
        valkey = running.enter_context(redis_servers.running("valkey", folder / "valkey"))
        moto = running.enter_context(s3_server.moto_server())
        store = running.enter_context(mooncake_server.running(folder))
        master = {"type": "mooncake", "master": store.address, "local_hostname": "127.0.0.1"}
        compressed = {"compression": "bitplane-zstd"}
        yield {
            "fs": {"type": "fs", "root_dir": str(folder / "kv"), **compressed},
            "redis": redis(valkey, **SIGNED),
            "s3": s3_server.options_for(moto.endpoint, "kv", type="s3"),
            "mooncake": {**master, "encryption_key_env": "TEST_KEY"},
            "signed": {"type": "fs", "root_dir": str(folder / "signed"), **SIGNED},
        }


def engines(model: str, tiers: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Play in an engine for each list of tiers, one after the other."""
    return {
        name: play(model, kvtier_config(secondary_tiers=each), LENGTHS, rounds=1, dtype="bfloat16")[
            0
        ]
        for name, each in tiers.items()
    }


@pytest.fixture(scope="module")
def told(
    llama: Path, shared: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Have an engine compute all, store it in each of the tiers, and end; then others find it."""
    signed = shared["signed"]
    strangers = {
        "without a key": {"type": "fs", "root_dir": signed["root_dir"]},
        "another key": {**signed, "auth_key_env": "TEST_OTHER_KEY"},
    }
    rounds, logs = {}, tmp_path_factory.mktemp("logs")
    for tiers in (
        {"cold": list(shared.values())},
        {kind: [tier] for kind, tier in {**shared, **strangers}.items()},
    ):
        rounds |= run_scenario(
            engines, log_folder=logs, environment=ENVIRONMENT, model=str(llama), tiers=tiers
        )
    cold = rounds["cold"]
    assert cold["cached"] == [0] * len(LENGTHS)
    for tier in cold["statistics"]["tiers"]:
        assert tier["counts"]["write_bytes"] == BLOCKS * cold["block_bytes"], tier
    assert_sound(cold)
    return {**rounds, "log": "".join(each.read_text(errors="replace") for each in logs.iterdir())}


def assert_sound(told: Mapping[str, Any]) -> None:
    """All tiers are connected and in use; nothing was damaged, failed or late."""
    assert_at_rest(told["statistics"])
    for tier in told["statistics"]["tiers"]:
        assert tier["connection"] == "UP", tier
        wrong = ("damaged", "failed", "load_misses", "crashes")
        late = ("jobs_timed_out", "probes_timed_out", "stores_deferred", "promotions_dropped")
        away = ("breaker_opened", "connections_lost")
        assert not any(tier["counts"][name] for name in (*wrong, *late, *away)), tier


@pytest.mark.parametrize("kind", [*SHARED, "signed"])
def test_another_engine_serves_what_the_first_has_stored(kind: str, told: dict[str, Any]) -> None:
    """With its first request: compressed in a folder, signed on Valkey, encrypted in Mooncake's."""
    assert told[kind]["tokens"] == told["cold"]["tokens"]
    assert_served(told[kind])


def assert_served(told: Mapping[str, Any]) -> None:
    """An engine's only tier had all whole blocks of all prompts, and gave each of them once."""
    assert told["cached"] == whole_blocks(LENGTHS)
    (tier,) = told["statistics"]["tiers"]
    assert tier["counts"]["read_bytes"] == BLOCKS * told["block_bytes"]
    assert_sound(told)


def test_their_log_has_nothing_of_trouble(told: dict[str, Any]) -> None:
    assert not re.search(r"^I\d{4} ", told["log"], re.MULTILINE), "Mooncake logs errors only"
    for trouble in (
        "backend raised",
        "tier lost its server",
        "tier did not stop within close_timeout_s; its slots stay mapped",
        "tier disabled",
    ):
        assert trouble not in told["log"]


def test_compressed_blocks_take_less_room(
    told: dict[str, Any], shared: dict[str, dict[str, Any]]
) -> None:
    sizes = [each.stat().st_size for each in Path(shared["fs"]["root_dir"]).rglob("*.kv")]
    assert len(sizes) == BLOCKS
    assert sum(sizes) < 0.8 * BLOCKS * (told["cold"]["block_bytes"] + 4096)


@pytest.mark.usefixtures("told")
def test_each_storage_says_in_plain_words_what_its_blocks_are_of(
    shared: dict[str, dict[str, Any]],
) -> None:
    """The same facts in all, but for how blocks are protected and compressed."""
    (of_folder,) = Path(shared["fs"]["root_dir"]).glob("*/config.json")
    with valkey.Valkey.from_url(shared["redis"]["url"]) as client:
        (name,) = client.keys("kvtier:*:description")
        of_valkey = client.get(name)
    s3 = s3_server.client_for(shared["s3"]["endpoint"])
    found = s3.list_objects_v2(Bucket=s3_server.BUCKET)["Contents"]
    (name,) = (each["Key"] for each in found if each["Key"].endswith("/description.json"))
    of_s3 = s3.get_object(Bucket=s3_server.BUCKET, Key=name)["Body"].read()
    facts = json.loads(of_folder.read_text())["facts"]
    assert facts["worker"]["model"]["weights"]["sample_digest"]
    assert facts.pop("compression") == shared["fs"]["compression"]
    assert json.loads(of_s3)["facts"] == facts
    assert json.loads(of_valkey)["facts"] == {**facts, "protection": "signed"}


def test_an_engine_without_the_key_or_with_another_one_finds_nothing(told: dict[str, Any]) -> None:
    """Without a key it does not even ask: such blocks have names of their own."""
    keyless, stranger = told["without a key"], told["another key"]
    for each in (keyless, stranger):
        assert each["cached"] == [0] * len(LENGTHS)
        assert each["tokens"] == told["cold"]["tokens"]
        assert_at_rest(each["statistics"])
    (of_keyless,) = keyless["statistics"]["tiers"]
    (of_stranger,) = stranger["statistics"]["tiers"]
    assert of_keyless["counts"]["promotion_jobs"] == 0
    assert of_stranger["counts"]["damaged"] == BLOCKS
    assert 0 < of_stranger["backend_counters"]["unauthenticated"] <= BLOCKS  # told once a second


# --- two engines at once ---


@pytest.mark.one_release
@pytest.mark.slow
@pytest.mark.long  # what a server that dies costs, tests/unit/runtime/test_redis_server.py shows
def test_two_engines_share_while_both_serve_and_go_on_when_their_server_is_killed(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """No request waits for a deadline: those here are longer than a test waits for an answer."""
    server = redis_servers.RedisServer("valkey", tmp_path / "server")
    with ExitStack() as running:
        running.callback(server.kill)
        server.start()
        two = running.enter_context(
            two_serving(llama, [redis(server)] * 2, 6, log_folder, tmp_path, ENVIRONMENT)
        )
        whole = sum(whole_blocks(LENGTHS))
        assert two.both(0, 1) == [0, 0]
        two.until_stored()
        assert two.both(1, 0) == [whole, whole]

        stored = server.ask("DBSIZE")
        asked = two.ask(2, 3)
        until(lambda: server.ask("DBSIZE") > stored)
        server.kill()
        assert two.cached(asked, 2, 3) == [0, 0]
        for engine in two.engines:
            engine.until_connection_is(GONE)
        assert two.both(3, 2) == [0, 0]

        server.start()
        for engine in two.engines:
            engine.until_connection_is(UP)
        assert two.both(4, 5) == [0, 0]
        two.until_stored()
        assert two.both(5, 4) == [whole, whole]
        for engine in two.engines:
            tier = engine.tier()
            assert (tier["breaker"], tier["connection"]) == ("CLOSED", "UP")
            counts = tier["counts"]
            assert (counts["connections_lost"], counts["damaged"]) == (1, 0)
            assert (counts["probes_timed_out"], counts["jobs_timed_out"]) == (0, 0)


# --- on a whole Ceph ---


@pytest.mark.long
@pytest.mark.slow
def test_an_engine_that_is_restarted_is_served_by_ceph(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """With its first request: token for token what an engine without offloading answers."""
    arguments: dict[str, Any] = {
        "log_folder": log_folder,
        "environment": ENVIRONMENT,
        "model": str(llama),
        "lengths": LENGTHS,
    }
    plain = run_scenario(tokens_of, **arguments)
    with ceph_server(tmp_path / "cluster") as ceph:
        tier = s3_server.options_for(
            ceph.endpoint, "restarted", type="s3", request_timeout_s=PATIENCE_S
        )
        config = kvtier_config(secondary_tiers=[tier])
        before, after = (
            run_scenario(play, extra_config=config, rounds=1, **arguments)[0] for _ in range(2)
        )
    assert before["cached"] == [0] * len(LENGTHS)
    assert before["tokens"] == after["tokens"] == plain
    assert_sound(before)
    assert_served(after)


# --- two ranks beside one ---


def canonical_rounds(
    model: str, tier: dict[str, Any], seeds: list[int], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    config = kvtier_config(secondary_tiers=[tier], canonical_layout=True)
    with engine(model, config, **settings) as running:
        return [play_round(running, prompts_of(LENGTHS, seed)) for seed in seeds]


# Ten processes of vLLM. That rows of two ranks are those of one, test_cpu_worker.py shows by their
# bytes, and test_engine_one_group.py that an engine serves such rows.
@pytest.mark.long
@pytest.mark.slow
def test_one_rank_and_two_serve_each_others_blocks_in_the_canonical_layout(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Token for token. Each rank loads and stores its own heads of a block."""
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with redis_servers.running("valkey", tmp_path / "server") as server:
        arguments: dict[str, Any] = {"model": str(llama), "tier": redis(server, **SIGNED)}

        def told(seeds: list[int], settings: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
            environment = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "0|1" if settings else "0"}
            rounds: list[dict[str, Any]] = run_scenario(
                canonical_rounds,
                log_folder=log_folder,
                environment=environment,
                seeds=seeds,
                settings=settings,
                **arguments,
                **more,
            )
            return rounds

        (of_one,) = told([7], {})
        found_by_two, of_two = told([7, 1000], ranks, spawns=True)
        (found_by_one,) = told([1000], {})
    plain = run_scenario(
        tokens_of, log_folder=log_folder, model=str(llama), lengths=LENGTHS, seed=1000
    )
    for computed in (of_one, of_two):
        assert computed["cached"] == [0] * len(LENGTHS)
    for found in (found_by_one, found_by_two):
        assert found["cached"] == whole_blocks(LENGTHS)
        assert_sound(found)
    assert found_by_two["tokens"] == of_one["tokens"]
    assert found_by_one["tokens"] == of_two["tokens"] == plain
