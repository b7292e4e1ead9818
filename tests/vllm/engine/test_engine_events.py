"""KV events: what the engine publishes folds to what is really there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.patience import PATIENCE_S
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.play import assert_at_rest, play_round, prompts_of

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [640, 700, 900]  #: in tokens
SLOTS = 40  #: fewer than blocks, so that some are evicted
BLOCK_BYTES = 65_536
REPLAY = "inproc://kv-events-replay"
GROUP_BYTES = 4


def published(model: str, root: str) -> dict[str, Any]:
    from vllm.config.kv_events import KVEventsConfig

    tiers = [
        {"type": "fs", "root_dir": root, "enable_kv_events": True, "locality": "REMOTE"},
        {"type": "memory", "capacity_bytes": 1 << 20},
    ]
    config = kvtier_config(
        cpu_bytes_to_use=SLOTS * BLOCK_BYTES,
        secondary_tiers=tiers,
        self_describing_kv_events=True,
    )
    events = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint="inproc://kv-events",
        replay_endpoint=REPLAY,
    )
    with engine(model, config, kv_events_config=events) as running:
        rounds = [play_round(running, prompts_of(LENGTHS)) for _ in range(2)]
        resident = running.manager().facade._primary.resident()
        batches = replayed()
    return {
        "rounds": rounds,
        "resident": sorted(key[:-GROUP_BYTES].hex() for key in resident),
        "events": [describe(event) for batch in batches for event in batch.events],
    }


def replayed() -> list[Any]:
    """Ask the publisher for all batches from the first on."""
    import msgspec
    import zmq
    from vllm.distributed.kv_events import KVEventBatch

    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    batches: list[Any] = []
    socket: Any
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(REPLAY)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            *_, payload = socket.recv_multipart()
            if not payload:
                return batches
            batches.append(decoder.decode(payload))


def describe(event: Any) -> dict[str, Any]:
    return {
        "kind": type(event).__name__,
        "medium": getattr(event, "medium", None),
        "locality": getattr(event, "locality", None),
        "ownership": getattr(event, "ownership", None),
        "tokens": len(getattr(event, "token_ids", ())),
        "hashes": [name.hex() for name in getattr(event, "block_hashes", ())],
    }


def test_events_fold_to_what_is_there(llama: Path, tmp_path: Path, log_folder: Path) -> None:
    """Promise 9. Tiers speak if they are told to; the memory tier here is not."""
    told = run_scenario(
        published,
        log_folder=log_folder,
        environment={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
        model=str(llama),
        root=str(tmp_path / "kv"),
    )
    cold, again = told["rounds"]
    assert again["tokens"] == cold["tokens"]
    assert sum(again["cached"]) > 0
    assert_at_rest(again["statistics"])

    there: dict[tuple[str, str | None], set[str]] = {}
    removed = 0
    for event in told["events"]:
        place = there.setdefault((event["medium"], event["ownership"]), set())
        if event["kind"] == "BlockStored":
            assert place.isdisjoint(event["hashes"]) or event["medium"] != "CPU"
            place.update(event["hashes"])
        elif event["kind"] == "BlockRemoved" and event["medium"] == "CPU":
            assert place.issuperset(event["hashes"])
            place.difference_update(event["hashes"])
            removed += len(event["hashes"])
    assert removed == again["statistics"]["primary"]["counts"]["evictions"] > 0
    assert sorted(there["CPU", None]) == told["resident"]
    files = {path.stem[: -2 * GROUP_BYTES] for path in (tmp_path / "kv").rglob("*.kv")}
    assert there["STORAGE", "1:fs"] == files
    assert {place for place in there if place[0] in ("CPU", "STORAGE")} == {
        ("CPU", None),
        ("STORAGE", "1:fs"),
    }

    ours = [event for event in told["events"] if event["medium"] in ("CPU", "STORAGE")]
    assert {event["locality"] for event in ours if event["medium"] == "STORAGE"} == {"REMOTE"}
    described = [event for event in ours if event["kind"] == "BlockStored" and event["tokens"]]
    assert described  # self-describing: they say which tokens they are
    assert {event["tokens"] for event in described} == {32}
