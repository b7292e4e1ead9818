"""An engine without requests: what its tiers lose is published all the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.server_program import free_port
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config, make_prompts

TIER_PROGRAM = b"kvtier.hosts"  #: in the command line of a tier's process


def published(model: str, folder: str, port: int) -> dict[str, Any]:
    """Fill a tier, kill its process, and ask the engine for nothing more."""
    import msgspec
    import zmq
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import KVEventBatch

    endpoint = f"tcp://127.0.0.1:{port}"
    tier = {
        "type": "disk",
        "path": folder,
        "capacity_bytes": 16 << 20,
        "isolation": "process",
        "enable_kv_events": True,
    }
    config = kvtier_config(secondary_tiers=[tier], self_describing_kv_events=True)
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    stored: set[bytes] = set()
    removed: set[bytes] = set()
    socket: Any
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.bind(endpoint)  # vLLM connects to an address without a star

        def hear() -> None:
            for event in decoder.decode(socket.recv_multipart()[-1]).events:
                if getattr(event, "medium", None) == "STORAGE":
                    kind = stored if type(event).__name__ == "BlockStored" else removed
                    kind.update(event.block_hashes)

        with engine(model, config, kv_events_config=events) as played:
            seed = 0
            while not stored:  # what is told before the subscription has arrived is lost
                seed += 1
                played.run(make_prompts(2, 640, seed))
                while socket.poll(0):
                    hear()
            os.kill(process_of_the_tier(), signal.SIGKILL)
            while not stored <= removed:
                hear()
    return {"stored": len(stored), "removed": len(removed)}


def process_of_the_tier() -> int:
    """Return the process of the only tier, which is of this session."""
    (found,) = (
        int(each.name)
        for each in Path("/proc").iterdir()
        if each.name.isdigit() and is_of_the_tier(each)
    )
    return found


def is_of_the_tier(process: Path) -> bool:
    try:
        is_ours = os.getsid(int(process.name)) == os.getsid(0)
        return is_ours and TIER_PROGRAM in (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return False


@pytest.mark.slow
def test_a_tier_that_breaks_while_nobody_asks_is_told_of(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Its blocks are announced as removed, and the log has the reason. No request came since."""
    told = run_scenario(
        published,
        log_folder=log_folder,
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
        },
        spawns=True,
        model=str(llama),
        folder=str(tmp_path / "disk"),
        port=free_port(),
    )
    assert told["removed"] >= told["stored"] > 0
    (log,) = log_folder.glob("published-*.log")
    assert "tier disabled" in log.read_text()
