"""Two engines with vLLM's ``p2p`` tier in kvtier: blocks go from one's memory to the other's."""

from __future__ import annotations

import json
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


class Load:
    """Prompts that one engine prefills and another decodes, eight at once."""

    def __init__(self, decoder: Peer) -> None:
        self.decoder = decoder
        self.names: list[str] = []  # of those asked for last
        self._seeds = iter(range(1000))

    def prompts(self) -> list[list[int]]:
        """Return prompts that nobody has seen."""
        return make_prompts(AT_ONCE, 200, seed=next(self._seeds))

    def params(self, at: Peer) -> list[dict[str, Any]]:
        """Return what the decode engine is told of requests that ``at`` is to prefill."""
        number = next(self._seeds)
        self.names = [f"{number}-{each}" for each in range(AT_ONCE)]
        return [{"remote_prefiller": source(at, each)} for each in self.names]

    def given(self, at: Peer, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Have an engine prefill the prompts; return what the decode engine is told."""
        params = self.params(at)
        at.run(prompts, [{"remote_decoder": {"kv_request_id": each}} for each in self.names], 1)
        return params

    def is_served(self, by: Peer) -> bool:
        """Whether anything came in time. A tier that was late is left alone for a while."""
        prompts = self.prompts()
        pulled = self.decoder.run(prompts, self.given(by, prompts))
        assert pulled["tokens"] == by.run(prompts)["tokens"]
        return sum(pulled["cached"]) > 0

    def has_slots_back(self) -> bool:
        """Whether no slot is kept for a peer that may still write it."""
        told = self.decoder.run([[3]], None, 1)
        return bool(told["statistics"]["primary"]["quarantined_slots"] == 0)


IMPATIENT = {"promote_timeout_s": TIMEOUT_S, "runtime": {"breaker_pause_s": PAUSE_S}}


KILLS = 4
ROUNDS = 5  #: of eight requests in each life of the peer: 200 in five lives


@pytest.mark.long  # minutes: nine engines start
@pytest.mark.one_release
def test_two_hundred_requests_while_the_peer_is_killed_and_restarted_four_times(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Each answer is that of an engine alone: served, in the middle of a load, with no peer."""
    ports = [free_port(), free_port()]
    answered: list[tuple[list[list[int]], Path]] = []
    served = []  # tokens from the peer, by life
    with (
        start_scenario(
            serve,
            log_folder,
            {},
            model=str(llama),
            extra_config=kvtier_config(),
            folder=str(tmp_path),
        ) as child,
        peer(llama, log_folder, tmp_path, ports[1], **IMPATIENT) as second,
    ):
        alone, load = Peer(child, tmp_path, 0), Load(second)

        def ask(params: list[dict[str, Any]], prompts: list[list[int]]) -> Path:
            answered.append((prompts, second.ask(prompts, params)))
            return answered[-1][1]

        for life in range(KILLS + 1):
            with peer(llama, log_folder, tmp_path, ports[0]) as first:
                if life:  # those in which it was gone, while it started
                    second.child.wait_for(answered[-1][1])
                until(lambda: load.is_served(first))
                told = []
                for _ in range(ROUNDS - 2):
                    prompts = load.prompts()
                    told.append(ask(load.given(first, prompts), prompts))
                served.append(
                    sum(sum(json.loads(second.child.wait_for(each))["cached"]) for each in told)
                )
                prompts = load.prompts()
                waiting = ask(load.given(first, prompts), prompts)
                if life < KILLS:
                    is_loading = second.folder / f"loading-{load.names[0]}"
                    until(lambda: is_loading.exists() or waiting.exists())  # noqa: B023 - as above
                    first.child.kill()
                gone = load.params(first)
            ask(gone, load.prompts())
        tokens = [json.loads(second.child.wait_for(told))["tokens"] for _, told in answered]
        right = [alone.run(prompts)["tokens"] for prompts, _ in answered]
        until(load.has_slots_back)
    assert len(answered) * AT_ONCE == 200
    assert tokens == right
    assert all(served), "what has the address of a killed peer serves"
