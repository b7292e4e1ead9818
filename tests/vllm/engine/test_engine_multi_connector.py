"""kvtier beside vLLM's ``NixlConnector`` in a ``MultiConnector``: prefill here and decode there.

What NIXL brought is stored by kvtier like all else, and found after the engine
has forgotten it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.support.server_program import free_port
from tests.vllm.support.children import start_scenario
from tests.vllm.support.engine import BLOCK_TOKENS, kvtier_config
from tests.vllm.support.peers import HOST, Peer, serve
from tests.vllm.support.play import prompts_of, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LENGTHS = [500, 1000, 333, 700]
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
ON_DISK = 'kvtier:tier_backend{count="blocks",tier="1:disk"}'
TO_BE_PULLED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@contextmanager
def nixl_engine(
    model: Path, log_folder: Path, tmp_path: Path, name: str, port: int
) -> Iterator[Peer]:
    folder = tmp_path / name
    folder.mkdir()
    disk = {"type": "disk", "path": str(tmp_path / f"disk-{name}"), "capacity_bytes": "64MB"}
    with start_scenario(
        serve,
        log_folder,
        {
            "NIXL_TELEMETRY_ENABLE": "y",
            "PYTHONHASHSEED": "0",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        },
        model=str(model),
        extra_config=kvtier_config(secondary_tiers=[disk]),
        folder=str(folder),
        settings={"before": [NIXL], "engine_id": name},
    ) as child:
        yield Peer(child, folder, port)


def test_nixl_brings_blocks_that_kvtier_keeps(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """And keeps none that NIXL failed to bring: they are computed, stored, and right."""
    prompts = prompts_of(LENGTHS)
    ports = [free_port(), free_port()]
    with (
        nixl_engine(llama, log_folder, tmp_path, "prefill", ports[0]) as prefill,
        nixl_engine(llama, log_folder, tmp_path, "decode", ports[1]) as decode,
    ):
        alone = prefill.run(prompts)
        assert alone["cached"] == [0] * len(prompts)
        answers = []
        for prompt in prompts[:-1]:
            (params,) = prefill.run([prompt], TO_BE_PULLED, 1, forget=True)["transfer_params"]
            answers.append(decode.run([prompt], params))
        assert answers[-1]["sources"] == {"p2p": sum(LENGTHS[:-1])}
        again = prefill.run(prompts, forget=True)
        assert (again["tokens"], again["cached"]) == (alone["tokens"], whole_blocks(LENGTHS))
        (params,) = prefill.run(prompts[-1:], TO_BE_PULLED, 1)["transfer_params"]
        prefill.child.kill()
        answers.append(decode.run(prompts[-1:], params))
        assert "NIXL transfer failure" in decode.child.log()
        assert [answer["tokens"][0] for answer in answers] == alone["tokens"]
        again = decode.run(prompts, forget=True)
        assert (again["tokens"], again["cached"]) == (alone["tokens"], whole_blocks(LENGTHS))
        assert again["sources"]["host"] == sum(whole_blocks(LENGTHS))
        metrics = again["metrics"]  # they reach vLLM's through the other connector
        assert metrics[ON_DISK] == sum(whole_blocks(LENGTHS)) / BLOCK_TOKENS
        assert metrics["kvtier:faults"] == 0
        assert again["statistics"]["primary"]["pinned_slots"] == 0
