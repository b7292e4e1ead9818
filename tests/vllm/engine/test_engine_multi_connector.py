"""kvtier beside other connectors in a ``MultiConnector``, in real engines.

Beside vLLM's ``NixlConnector``, prefill here and decode there: what NIXL brought is stored by
kvtier like all else, and found after the engine has forgotten it. Beside vLLM's own
``OffloadingConnector``: kvtier serves if it is the first of the two, and is refused
otherwise. So is a tier of its own in vLLM's spec.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.patience import until
from tests.support.server_program import free_port
from tests.vllm.support.children import run_scenario, start_scenario
from tests.vllm.support.engine import BLOCK_TOKENS, CONNECTOR, engine, kvtier_config, vllms_config
from tests.vllm.support.peers import HOST, Peer, serve
from tests.vllm.support.play import own_id, prompts_of, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LENGTHS = [500, 1000, 333, 700]
BLOCKS = sum(whole_blocks(LENGTHS)) // BLOCK_TOKENS
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
ON_DISK = 'kvtier:disk_blocks{tier="1:disk"}'
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
        settings={"before": [NIXL], "engine_id": own_id(name)},
    ) as child:
        yield Peer(child, folder, port)


@pytest.mark.one_release
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
        # They reach vLLM's through the other connector. Backends tell from time to time.
        until(lambda: decode.run([[3]])["metrics"].get(ON_DISK) == BLOCKS)
        assert again["metrics"]["kvtier:faults"] == 0
        assert again["statistics"]["primary"]["pinned_slots"] == 0


def beside_vllms_own(model: str, disk: str) -> dict[str, Any]:
    """Play kvtier before and behind a connector with vLLM's own manager and region."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    tier = {"type": "disk", "path": disk, "capacity_bytes": "64MB"}
    ours = {**CONNECTOR, "kv_connector_extra_config": kvtier_config(secondary_tiers=[tier])}
    vllms, inner = (
        {**CONNECTOR, "kv_connector_extra_config": vllms_config(32 << 20, *tiers)}
        for tiers in ((), (tier,))
    )

    def beside(*connectors: dict[str, Any]) -> Any:
        config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": list(connectors)},
        )
        return engine(model, None, kv_transfer_config=config)

    prompts = prompts_of(LENGTHS)
    told: dict[str, Any] = {}
    with beside(ours, vllms) as running:
        for round_ in ("cold", "warm"):
            running.forget()
            told[round_] = running.run_one_by_one(prompts).as_json()
        until(lambda: running.run([[3]], max_tokens=1) and running.metrics().get(ON_DISK) == BLOCKS)
    for kind, both in (("spec", (vllms, ours)), ("tier", (vllms, inner)), ("twice", (ours, ours))):
        told[kind] = "none"
        try:
            with beside(*both):
                pass
        except Exception as refused:  # noqa: BLE001 - whatever vLLM makes of it
            told[kind] = str(refused)
        ensure_kv_transfer_shutdown()  # vLLM keeps the worker's side of a start that failed
    return told


def test_beside_vllms_offloading_kvtier_serves_if_it_is_first_and_else_is_refused(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """vLLM ends at a metric that the first of the two has not defined."""
    told = run_scenario(
        beside_vllms_own, log_folder=log_folder, model=str(llama), disk=str(tmp_path / "disk")
    )
    assert told["cold"]["cached"] == [0] * len(LENGTHS)
    assert told["warm"]["cached"] == whole_blocks(LENGTHS)
    assert told["cold"]["tokens"] == told["warm"]["tokens"]
    assert "Put kvtier's entry before it" in told["spec"]
    assert "Put the entry with KVTierSecondaryTier before it" in told["tier"]
    # Both have one engine_id, and so one shared memory: they said that the ranks disagree.
    assert "MultiConnector" in told["twice"]
    assert "its secondary_tiers" in told["twice"]
