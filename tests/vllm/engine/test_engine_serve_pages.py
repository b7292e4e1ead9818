"""``vllm serve`` of three pages, as it is printed: servers start, and requests find their blocks.

vLLM's build for the CPU lacks the command itself, but has its server. On the CPU, NIXL needs to be
told that its buffers are there, too.
"""

from __future__ import annotations

import json
import re
import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from kvtier.tools.cli.main import main
from tests.support.patience import until
from tests.support.printed import DOCS, Reader, commands
from tests.support.server_program import HOST, free_port
from tests.vllm.engine.test_engine_multi_connector import TO_BE_PULLED
from tests.vllm.engine.test_engine_server import LENGTHS, Server, serve, server
from tests.vllm.support.importing import importing_vllm
from tests.vllm.support.nixl import let_nixl_rest
from tests.vllm.support.play import prompts_of, whole_blocks

with importing_vllm():
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PEERS, BESIDE, EVENTS = (
    f"how-to/{name}.md" for name in ("prefill-decode", "beside-other-connectors", "behind-llm-d")
)
TRANSFER = "--kv-transfer-config"


class Served:
    """A page's commands, for a server that listens to peers or routers on one ``port``."""

    def __init__(self, page: str, folder: Path) -> None:
        self.port = free_port()
        own = {"34359738368": "67108864"}
        nixl = '"NixlConnector", "kv_role": "kv_both"'
        tables = {
            PEERS: {"10.0.0.7": HOST, "5710": str(self.port)},
            BESIDE: {
                "/nvme/kvtier": str(folder / "kv"),
                "200GB": "64MB",
                nixl: f'{nixl}, "kv_buffer_device": "cpu"',
            },
            EVENTS: {
                "/nvme/kv": str(folder / "kv"),
                "500GiB": "64MiB",
                "tcp://*:5557": f"tcp://{HOST}:{self.port}",
            },
        }
        self.reader = Reader(folder, own | tables[page])
        *exports, serve = commands(page)
        for export in exports:
            self.reader.run(export)
        words = shlex.split(self.reader.here(serve))
        assert words[:3] == ["vllm", "serve", "MODEL"]
        self.options = words[3:]
        self.transfer = json.loads(words[words.index(TRANSFER) + 1])

    @contextmanager
    def running(self, model: Path) -> Iterator[Server]:
        environment = {
            **self.reader.environment,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port),
        }
        with server(
            model,
            {},
            self.reader.folder / "logs",
            more=self.options,
            environment=environment,
            scenario=serve_at_rest,
        ) as running:
            yield running


def serve_at_rest(arguments: list[str]) -> None:
    """A scenario: two servers share two processors, which NIXL's threads would keep busy."""
    let_nixl_rest()
    serve(arguments)


@pytest.mark.one_release
@pytest.mark.parametrize("page", [PEERS, BESIDE, EVENTS])
def test_nothing_printed_is_refused_before_a_start(page: str, tmp_path: Path) -> None:
    served = Served(page, tmp_path / "reader")
    file = tmp_path / "kv.json"
    file.write_text(json.dumps(served.transfer))
    assert main(["check", str(file)]) == 0
    served.reader.check_all_is_used()


@pytest.mark.long  # two servers of vLLM
@pytest.mark.one_release
def test_a_decode_engine_takes_from_its_peer_what_a_router_names(
    llama: Path, tmp_path: Path
) -> None:
    """With the requests of the page's table."""
    rows = re.findall(r"\| `(\{\"remote_.*\})` \|", (DOCS / PEERS).read_text())
    with two_servers(PEERS, tmp_path, llama) as (prefill, decode, at_prefill):
        give, take, look = (json.loads(at_prefill.here(row)) for row in rows)
        first, other = prompts_of(LENGTHS)
        prefill.complete(first, max_tokens=1, kv_transfer_params=give)
        taken = decode.complete(first, kv_transfer_params=take)
        computed = prefill.complete(other)
        looked_up = decode.complete(other, kv_transfer_params=look)
        assert [taken["cached"], looked_up["cached"]] == whole_blocks(LENGTHS)
        assert taken["tokens"] == prefill.complete(first)["tokens"]
        assert looked_up["tokens"] == computed["tokens"]


@pytest.mark.long  # two servers of vLLM
@pytest.mark.one_release
def test_nixl_brings_a_prompt_and_kvtier_has_it_afterwards(llama: Path, tmp_path: Path) -> None:
    with two_servers(BESIDE, tmp_path, llama) as (prefill, decode, _):
        prompt, _ = prompts_of(LENGTHS)
        given = prefill.complete(prompt, max_tokens=1, kv_transfer_params=TO_BE_PULLED)
        pulled = decode.complete(prompt, kv_transfer_params=given["params"])
        from_peer = re.findall(
            r'^vllm:prompt_tokens_cached_by_source_total\{.*source="p2p".* (.*)$',
            decode.call("/metrics"),
            re.MULTILINE,
        )
        assert [*map(float, from_peer)] == [len(prompt)]
        decode.forget()
        again = decode.complete(prompt)
        assert again["cached"] == whole_blocks(LENGTHS)[0]
        assert pulled["tokens"] == again["tokens"] == prefill.complete(prompt)["tokens"]


@pytest.mark.long  # a server of vLLM
@pytest.mark.one_release
def test_a_router_hears_of_host_memory_and_disk(llama: Path, tmp_path: Path) -> None:
    served = Served(EVENTS, tmp_path / "reader")
    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    heard: dict[str, Any] = {}
    socket: Any
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"kv@POD@MODEL")
        socket.bind(f"tcp://{HOST}:{served.port}")
        with served.running(llama) as running:

            def are_announced() -> bool:
                running.forget("?reset_external=true")
                running.complete(prompts_of(LENGTHS)[0])  # what came before the router is lost
                while socket.poll(0):
                    for event in decoder.decode(socket.recv_multipart()[-1]).events:
                        if isinstance(event, BlockStored):
                            heard[event.medium or ""] = event.token_ids
                return heard.keys() >= {"CPU", "STORAGE"}

            until(are_announced, lambda: [*heard])
    assert all(heard.values()), "a router needs the tokens"


@contextmanager
def two_servers(page: str, folder: Path, model: Path) -> Iterator[tuple[Server, Server, Reader]]:
    """Start two by a page's commands, and give what names the first one to the other."""
    first, second = (Served(page, folder / name) for name in ("prefill", "decode"))
    with first.running(model) as prefill, second.running(model) as decode:
        yield prefill, decode, first.reader
