"""Several engines over one storage: what one has stored, another serves, token for token.

One engine stores in all of them: a shared folder, a Valkey server, an S3 server and a Mooncake
store. Others, in processes of their own, each find it in one. Two share while both serve, and
go on when their server is killed. With vLLM 0.33, these two alone show that engines share.
``make test-long`` has engines over a whole Ceph as well.
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
        yield {
            "fs": {"type": "fs", "root_dir": str(folder / "kv")},
            "redis": redis(valkey, **SIGNED),
            "s3": s3_server.options_for(moto.endpoint, "kv", type="s3"),
            "mooncake": {**master, "encryption_key_env": "TEST_KEY"},
            "signed": {"type": "fs", "root_dir": str(folder / "signed"), **SIGNED},
        }


@pytest.fixture(scope="module")
def cold(
    llama: Path, shared: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Have an engine compute all, store it in each of the tiers, and end."""
    (told,) = run_scenario(
        play,
        log_folder=tmp_path_factory.mktemp("cold"),
        environment=ENVIRONMENT,
        model=str(llama),
        extra_config=kvtier_config(secondary_tiers=list(shared.values())),
        lengths=LENGTHS,
        rounds=1,
    )
    assert told["cached"] == [0] * len(LENGTHS)
    for tier in told["statistics"]["tiers"]:
        assert tier["counts"]["write_bytes"] == BLOCKS * told["block_bytes"], tier
    assert_sound(told)
    return dict(told)


def assert_sound(told: Mapping[str, Any]) -> None:
    """All tiers are connected and in use; nothing was damaged, failed or late."""
    assert_at_rest(told["statistics"])
    for tier in told["statistics"]["tiers"]:
        assert tier["connection"] == "UP", tier
        wrong = ("damaged", "failed", "load_misses", "crashes", "breaker_opened", "connections_lost")
        late = ("jobs_timed_out", "probes_timed_out", "stores_deferred", "promotions_dropped")
        assert not any(tier["counts"][name] for name in (*wrong, *late)), tier


def assert_served_by(kind: str, told: Mapping[str, Any]) -> None:
    """An engine's only tier had all whole blocks of all prompts, and gave each of them once."""
    assert told["cached"] == whole_blocks(LENGTHS)
    metrics, size = told["metrics"], BLOCKS * told["block_bytes"]
    assert metrics[f'vllm:kv_offload_tiering_read_bytes{{tier="1:{kind}"}}'] == size
    assert metrics[f'vllm:kv_offload_tiering_chunk_hits{{tier="1:{kind}"}}'] == BLOCKS
    assert metrics["vllm:kv_offload_load_bytes"] == size
    assert_sound(told)


@pytest.mark.one_release
@pytest.mark.parametrize("kind", SHARED)
def test_another_engine_serves_what_the_first_has_stored(
    kind: str,
    llama: Path,
    shared: dict[str, dict[str, Any]],
    cold: dict[str, Any],
    log_folder: Path,
) -> None:
    """With its first request after the start. Signed on Valkey, encrypted in Mooncake's store.

    That an engine without offloading gives the same tokens, the two below show.
    """
    (told,) = run_scenario(
        play,
        log_folder=log_folder,
        environment=ENVIRONMENT,
        model=str(llama),
        extra_config=kvtier_config(secondary_tiers=[shared[kind]]),
        lengths=LENGTHS,
        rounds=1,
    )
    assert told["tokens"] == cold["tokens"]
    assert_served_by(kind, told)
    (log,) = log_folder.glob("*.log")
    text = log.read_text(errors="replace")
    assert not re.search(r"^I\d{4} ", text, re.MULTILINE), "Mooncake's client logs errors only"
    for trouble in (
        "backend raised",
        "tier lost its server",
        "tier did not stop within close_timeout_s; its slots stay mapped",
        "tier broke",
    ):
        assert trouble not in text


@pytest.mark.one_release
@pytest.mark.usefixtures("cold")
def test_each_storage_says_in_plain_words_what_its_blocks_are_of(
    shared: dict[str, dict[str, Any]],
) -> None:
    """The same facts in all, but for how blocks are protected."""
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
    assert json.loads(of_s3)["facts"] == facts
    assert json.loads(of_valkey)["facts"] == {**facts, "protection": "signed"}


def two_engines(
    model: str, configs: list[dict[str, Any]], lengths: list[int]
) -> list[dict[str, Any]]:
    return [play(model, config, lengths, rounds=1)[0] for config in configs]


@pytest.mark.one_release
def test_an_engine_without_the_key_or_with_another_one_finds_nothing(
    llama: Path, shared: dict[str, dict[str, Any]], cold: dict[str, Any], log_folder: Path
) -> None:
    """Without a key it does not even ask: such blocks have names of their own."""
    signed = shared["signed"]
    without = {"type": "fs", "root_dir": signed["root_dir"]}
    other = {**signed, "auth_key_env": "TEST_OTHER_KEY"}
    keyless, stranger = run_scenario(
        two_engines,
        log_folder=log_folder,
        environment=ENVIRONMENT,
        model=str(llama),
        configs=[kvtier_config(secondary_tiers=[tier]) for tier in (without, other)],
        lengths=LENGTHS,
    )
    for told in (keyless, stranger):
        assert told["cached"] == [0] * len(LENGTHS)
        assert told["tokens"] == cold["tokens"]
        assert_at_rest(told["statistics"])
    (of_keyless,) = keyless["statistics"]["tiers"]
    (of_stranger,) = stranger["statistics"]["tiers"]
    assert of_keyless["counts"]["promotion_jobs"] == 0
    assert of_stranger["counts"]["damaged"] == BLOCKS
    assert 0 < of_stranger["backend_counters"]["unauthenticated"] <= BLOCKS  # told once a second


# --- two engines at once ---


@pytest.mark.one_release
@pytest.mark.slow
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


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run it; return the address of its gateway."""
    with ceph_server(tmp_path_factory.mktemp("ceph") / "cluster") as server:
        yield server.endpoint


def on_ceph(endpoint: str, prefix: str) -> dict[str, Any]:
    return s3_server.options_for(endpoint, prefix, type="s3", request_timeout_s=PATIENCE_S)


@pytest.mark.long
@pytest.mark.slow
def test_an_engine_that_is_restarted_is_served_by_ceph(
    llama: Path, ceph: str, log_folder: Path
) -> None:
    """With its first request: token for token what an engine without offloading answers."""
    arguments: dict[str, Any] = {"model": str(llama), "lengths": LENGTHS}
    plain = run_scenario(tokens_of, log_folder=log_folder, **arguments)
    config = kvtier_config(secondary_tiers=[on_ceph(ceph, "restarted")])
    before, after = (
        run_scenario(
            play,
            log_folder=log_folder,
            environment=ENVIRONMENT,
            extra_config=config,
            rounds=1,
            **arguments,
        )[0]
        for _ in range(2)
    )
    assert before["cached"] == [0] * len(LENGTHS)
    assert before["tokens"] == after["tokens"] == plain
    assert_sound(before)
    assert_served_by("s3", after)


@pytest.mark.long
@pytest.mark.slow
def test_two_engines_share_a_bucket_on_ceph_while_both_serve(
    llama: Path, ceph: str, tmp_path: Path, log_folder: Path
) -> None:
    """Each serves what the other has stored, while that one serves too."""
    with two_serving(
        llama, [on_ceph(ceph, "shared")] * 2, 2, log_folder, tmp_path, ENVIRONMENT
    ) as two:
        assert two.both(0, 1) == [0, 0]
        two.until_stored()
        assert two.both(1, 0) == [sum(whole_blocks(LENGTHS))] * 2
        for engine in two.engines:
            tier = engine.tier()
            assert (tier["breaker"], tier["connection"]) == ("CLOSED", "UP")
            counts = tier["counts"]
            assert counts["read_bytes"] == counts["write_bytes"] > 0
            for wrong in ("connections_lost", "damaged", "failed", "absent"):
                assert counts[wrong] == 0, (wrong, tier)


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
