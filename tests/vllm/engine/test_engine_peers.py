"""Two engines with vLLM's ``p2p`` tier in kvtier: blocks go from one's memory to the other's."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.patience import until
from tests.support.server_program import free_port
from tests.vllm.support.children import start_scenario
from tests.vllm.support.engine import PATIENT, kvtier_config, make_prompts
from tests.vllm.support.peers import HOST, Peer, serve
from tests.vllm.support.play import prompts_of, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LENGTHS = [500, 1000, 333, 700]
AT_ONCE = 8
TIMEOUT_S = 3.0  #: for what a stopped peer was asked for, which never comes
PAUSE_S = 0.1  #: until a tier that was left alone is asked again


@contextmanager
def peer(
    model: Path,
    log_folder: Path,
    tmp_path: Path,
    port: int,
    runtime: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Peer]:
    folder = Path(tempfile.mkdtemp(prefix=f"peer-{port}-", dir=tmp_path))
    tier = {
        "type": "vllm",
        "tier": {"type": "p2p", "host": HOST, "port": port},
        **PATIENT,
        **settings,
    }
    with start_scenario(
        serve,
        log_folder,
        {"NIXL_TELEMETRY_ENABLE": "y", "PYTHONHASHSEED": "0"},
        model=str(model),
        extra_config=kvtier_config(secondary_tiers=[tier], **(runtime or {})),
        folder=str(folder),
    ) as child:
        yield Peer(child, folder, port)


def source(played: Peer, name: str) -> dict[str, Any]:
    return {"kv_request_id": name, "remote_host": HOST, "remote_port": played.port}


def test_blocks_of_another_engines_memory_give_the_same_tokens(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Prefill here and decode there; an ordinary request; and one whose peer is killed."""
    ports = [free_port(), free_port()]
    prompts = prompts_of(LENGTHS)
    with (
        peer(llama, log_folder, tmp_path, ports[0]) as first,
        peer(llama, log_folder, tmp_path, ports[1]) as second,
    ):
        alone = first.run(prompts[2:])["tokens"]
        answers = []
        for number, prompt in enumerate(prompts[:2]):
            name = f"k{number}"
            first.run([prompt], {"remote_decoder": {"kv_request_id": name}}, 1)
            answers.append(second.run([prompt], {"remote_prefiller": source(first, name)}))
        answers.append(second.run([prompts[2]], {"remote_kv_source": source(first, "k2")}))
        assert [answer["cached"][0] for answer in answers] == whole_blocks(LENGTHS[:3])
        alone = first.run(prompts[:2])["tokens"] + alone
        assert [answer["tokens"][0] for answer in answers] == alone[:3]
        assert answers[-1]["sources"] == {"p2p": sum(whole_blocks(LENGTHS[:3]))}
        waiting = second.ask([prompts[3]], {"remote_prefiller": source(first, "never")})
        second.child.wait_for(second.folder / "loading-never")
        first.child.kill()
        killed = json.loads(second.child.wait_for(waiting))
        assert (killed["cached"], killed["tokens"][0]) == ([0], alone[3])
        assert killed["statistics"]["primary"]["quarantined_slots"] == 0


# What a release changes of its peers, the test above meets. This one is about kvtier's limits.
@pytest.mark.one_release
def test_a_stopped_peer_holds_nobody_up_and_a_restarted_one_serves(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Eight requests at once. Those of a stopped peer end without it, and it keeps their slots.

    They come back when its process is gone. What has its address next serves.
    """
    ports = [free_port(), free_port()]
    seeds = iter(range(1000))

    def asked_at_once() -> list[list[int]]:
        return make_prompts(AT_ONCE, 200, seed=next(seeds))

    def given(at: Peer, prompts: list[list[int]], name: str) -> list[dict[str, Any]]:
        """Have an engine prefill the prompts; return what the decode engine is told."""
        names = [f"{name}-{number}" for number in range(AT_ONCE)]
        at.run(prompts, [{"remote_decoder": {"kv_request_id": each}} for each in names], 1)
        return [{"remote_prefiller": source(at, each)} for each in names]

    def is_served(by: Peer) -> bool:
        """Whether anything came in time. A tier that was late is left alone for a while."""
        prompts = asked_at_once()
        pulled = second.run(prompts, given(by, prompts, f"asked-{next(seeds)}"))
        assert pulled["tokens"] == by.run(prompts)["tokens"]
        return sum(pulled["cached"]) > 0

    impatient = {"promote_timeout_s": TIMEOUT_S, "runtime": {"breaker_pause_s": PAUSE_S}}
    with peer(llama, log_folder, tmp_path, ports[1], **impatient) as second:
        with peer(llama, log_folder, tmp_path, ports[0]) as first:
            until(lambda: is_served(first))
            prompts = asked_at_once()
            params = given(first, prompts, "stopped")
            alone = first.run(prompts)["tokens"]
            os.kill(first.child.pid, signal.SIGSTOP)
            stopped = second.run(prompts, params)
            assert (stopped["tokens"], stopped["cached"]) == (alone, [0] * AT_ONCE)
            assert stopped["statistics"]["primary"]["quarantined_slots"] > 0
        until(lambda: second.run([[3]], None, 1)["statistics"]["primary"]["quarantined_slots"] == 0)
        with peer(llama, log_folder, tmp_path, ports[0]) as third:
            until(lambda: is_served(third))
