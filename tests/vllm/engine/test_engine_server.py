"""The HTTP server: the engine core in a process of its own, requests and metrics over HTTP."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.patience import PATIENCE_S, until
from tests.support.server_program import free_port
from tests.vllm.support.children import Child, start_scenario
from tests.vllm.support.engine import flat_metrics, kvtier_config
from tests.vllm.support.play import ours_in_shm, own_id, prompts_of, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

SERVER = "vllm.entrypoints.openai.api_server"
LENGTHS = [500, 900]
BLOCK_BYTES = 65_536  #: two of K and V, four layers, two heads of 32 float32 for 32 tokens
ENGINE_ID = own_id("test-server")
ONLY_MEMORY = {"kv_load_tiers": [{"medium": "CPU"}]}

QUERIES = "vllm:kv_offload_tiering_chunk_queries"
HITS = "vllm:kv_offload_tiering_chunk_hits"
READ = 'vllm:kv_offload_tiering_read_bytes{tier="1:fs"}'
WRITTEN = 'vllm:kv_offload_tiering_write_bytes{tier="1:fs"}'
LOADED = "vllm:kv_offload_load_bytes"
STORED = "vllm:kv_offload_store_bytes"


class Server:
    """One running server, on loopback."""

    def __init__(self, port: int, process: Child) -> None:
        self.process = process
        self._port = port

    def call(self, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> str:
        """Send GET, or with a ``body`` POST, and return the answer's text."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            text: str = answer.read().decode()
        return text

    def complete(
        self, prompt: list[int], max_tokens: int = 8, dp_rank: int = 0, **extra: Any
    ) -> dict[str, Any]:
        """Return the tokens and how many tokens of the prompt were not computed."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            **extra,
        }
        headers = {"X-data-parallel-rank": str(dp_rank)}
        answer = json.loads(self.call("/v1/completions", body, headers))
        details = answer["usage"].get("prompt_tokens_details") or {}
        return {
            "tokens": answer["choices"][0]["token_ids"],
            "cached": details.get("cached_tokens") or 0,
            "params": answer.get("kv_transfer_params"),
        }

    def complete_from_disk(self, prompt: list[int], cached: int, dp_rank: int) -> dict[str, Any]:
        """Complete it until so many of its tokens come from disk: stores take a while."""
        answer: dict[str, Any] = {}

        def is_from_disk() -> bool:
            self.forget("?reset_external=true")  # memory, not the disk
            answer.update(self.complete(prompt, dp_rank=dp_rank))
            return bool(answer["cached"] == cached)

        until(is_from_disk, lambda: answer)
        return answer

    def forget(self, query: str = "") -> None:
        """Empty the prefix cache; refused while the last transfers end."""
        until(lambda: json.loads(self.call(f"/reset_prefix_cache{query}", {}))["success"])

    def play(self, **extra: Any) -> tuple[list[list[int]], list[int]]:
        """Complete all prompts with an empty prefix cache; return tokens and cached tokens."""
        self.forget()
        answers = [self.complete(prompt, **extra) for prompt in prompts_of(LENGTHS)]
        return [each["tokens"] for each in answers], [each["cached"] for each in answers]

    def metrics(self) -> dict[str, float]:
        """Scrape ``/metrics``."""
        from prometheus_client.parser import text_string_to_metric_families

        return flat_metrics(text_string_to_metric_families(self.call("/metrics")))

    def metrics_when(self, reached: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Scrape until ``reached``; a request shorter than a block has counters published."""
        found: dict[str, float] = {}

        def is_reached() -> bool:
            self.complete([3], max_tokens=1)
            found.update(self.metrics())
            return reached(found)

        until(is_reached, lambda: found)
        return found


@contextmanager
def server(
    model: Path,
    extra_config: dict[str, Any],
    log_folder: Path,
    *,
    engines: int = 1,
    shutdown_timeout_s: int = 0,
    more: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    scenario: Callable[[list[str]], None] | None = None,
) -> Iterator[Server]:
    """Start a server and wait until it answers; it is gone afterwards in any case.

    It is a fork, which has all imported: ``make server`` starts one as users do. ``more``: come
    behind all other arguments, which they replace. ``scenario``: in place of ``serve``.
    """
    port = free_port()
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": ENGINE_ID,
        "kv_connector_extra_config": extra_config,
    }
    options = {
        "--model": str(model),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--block-size": "32",
        "--num-gpu-blocks-override": "70",
        "--max-model-len": "2048",
        "--seed": "0",
        "--data-parallel-size": str(engines),
        "--shutdown-timeout": str(shutdown_timeout_s),
        "--kv-transfer-config": json.dumps(transfer),
    }
    flags = ["--enforce-eager", "--skip-tokenizer-init", "--enable-prompt-tokens-details"]
    arguments = [*flags, *(part for option in options.items() for part in option), *more]
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        # vLLM 0.33 wants a NUMA node for each engine, and may be told that it has them.
        "VLLM_CPU_SIM_MULTI_NUMA": "1",
        **(environment or {}),
    }
    with start_scenario(
        scenario or serve, log_folder, environment, spawns=True, arguments=arguments
    ) as process:
        running = Server(port, process)
        until(lambda: process.has_ended() or is_up(running), process.log)
        assert not process.has_ended(), process.log()
        yield running


def serve(arguments: list[str]) -> None:
    """Do what ``python -m`` does with the server's module."""
    sys.argv[1:] = arguments
    runpy.run_module(SERVER, run_name="__main__")


def is_up(running: Server) -> bool:
    try:
        running.call("/health")
    except (urllib.error.URLError, OSError):
        return False
    return True


@pytest.mark.one_release
def test_a_server_that_is_killed_and_one_that_takes_over(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Cold, from memory, then after ``kill -9`` of all its processes from disk."""
    tier = {"type": "fs", "root_dir": str(tmp_path / "kv")}
    config = kvtier_config(secondary_tiers=[tier], on_reset="keep")
    expected = whole_blocks(LENGTHS)
    blocks = sum(expected) // 32
    size = blocks * BLOCK_BYTES

    with server(llama, config, log_folder) as first:
        tokens, cached = first.play()
        assert cached == [0] * len(LENGTHS)
        first.metrics_when(lambda now: now.get(WRITTEN) == size)
        assert first.play() == (tokens, expected)
        seen = first.metrics_when(lambda now: now.get(LOADED) == size)
        assert seen[STORED] == seen[WRITTEN] == size
        assert seen.get(READ, 0) == 0
        assert seen[f'{HITS}{{tier="0:primary"}}'] == blocks
        assert seen[f'{QUERIES}{{tier="0:primary"}}'] == 2 * blocks
        assert seen[f'{QUERIES}{{tier="1:fs"}}'] == blocks
        assert seen["vllm:kv_offload_cpu_cache_usage_perc"] == 0
        assert seen["vllm:kv_offload_cpu_allocation_size_sum"] == blocks
        assert seen['vllm:kv_offload_tiering_active_cascade_jobs{tier="1:fs"}'] == 0
        assert seen['kvtier:primary_slots{state="ready"}'] == blocks
        assert seen['kvtier:primary_slots{state="quarantined"}'] == 0
        assert seen['kvtier:tier_breaker_state{tier="1:fs",work="loads"}'] == 0
        assert ours_in_shm(ENGINE_ID) == []  # gone already, so a kill can leave nothing
        os.killpg(first.process.pid, signal.SIGKILL)
        until(first.process.has_ended)
    assert ours_in_shm(ENGINE_ID) == []

    with server(llama, config, log_folder) as second:
        # The disk has all of it, and may not be asked.
        assert second.play(kv_transfer_params=ONLY_MEMORY) == (tokens, [0] * len(LENGTHS))
        seen = second.metrics_when(lambda now: now.get(STORED) == size)
        assert seen.get(READ, 0) == 0
        assert seen.get(f'{QUERIES}{{tier="1:fs"}}', 0) == 0
        # What it has recomputed is in memory now, which it may use.
        assert second.play(kv_transfer_params=ONLY_MEMORY) == (tokens, expected)

        second.forget("?reset_external=true")  # memory, not the disk
        second.forget()
        asked = {"kvtier_report": True}
        answers = [second.complete(each, kv_transfer_params=asked) for each in prompts_of(LENGTHS)]
        assert [each["cached"] for each in answers] == expected
        reports = [each["params"]["kvtier_report"] for each in answers]
        assert [each["loaded_tokens"].get("1:fs", 0) for each in reports] == expected
        assert all(each["waited_s"] > 0 for each in reports[:-1]), "the last is below a block"
        assert second.complete(prompts_of(LENGTHS)[0])["params"] is None, "nobody has asked"
        seen = second.metrics_when(lambda now: now.get(READ) == size)
        assert seen[f'{HITS}{{tier="1:fs"}}'] == blocks
        assert seen['kvtier:primary_slots{state="quarantined"}'] == 0
        os.kill(second.process.pid, signal.SIGTERM)
        until(second.process.has_ended, second.process.log)
    assert ours_in_shm(ENGINE_ID) == []


@pytest.mark.one_release
def test_data_parallel_engines_have_a_disk_folder_each(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """One configuration for all; what one has stored, the other doesn't find."""
    folders = [tmp_path / f"engine-{dp_rank}" for dp_rank in range(2)]
    tier = {"type": "disk", "path": f"{tmp_path}/engine-{{dp_rank}}", "capacity_bytes": 16 << 20}
    prompts = prompts_of(LENGTHS)
    expected = whole_blocks(LENGTHS)
    config = kvtier_config(secondary_tiers=[tier], on_reset="keep")
    with server(llama, config, log_folder, engines=2) as running:
        cold = [running.complete(each, dp_rank=rank) for rank, each in enumerate(prompts)]
        assert [each["cached"] for each in cold] == [0, 0]
        for rank, prompt in enumerate(prompts):
            warm = running.complete_from_disk(prompt, expected[rank], dp_rank=rank)
            assert warm["tokens"] == cold[rank]["tokens"]
        assert all((folder / "lock").exists() for folder in folders)
        assert running.complete(prompts[0], dp_rank=1) == cold[0]


@pytest.mark.long
@pytest.mark.one_release
def test_a_server_whose_storage_hangs_ends_by_itself(llama: Path, log_folder: Path) -> None:
    """Long before vLLM would kill it: its tiers are closed, and what they hold is given back."""
    tier = {
        "type": "memory",
        "capacity_bytes": 64 << 20,
        "store_timeout_s": 3600,
        "faults": {"store": {"hang": True}},
    }
    config = kvtier_config(secondary_tiers=[tier], close_timeout_s=1)
    with server(llama, config, log_folder, shutdown_timeout_s=3600) as running:
        running.complete(prompts_of(LENGTHS)[0])
        jobs = 'vllm:kv_offload_tiering_active_cascade_jobs{tier="1:memory"}'
        running.metrics_when(lambda now: now.get(jobs, 0) > 0)
        os.kill(running.process.pid, signal.SIGTERM)
        until(running.process.has_ended, running.process.log)
        assert "force killing" not in running.process.log()
