"""Stress a real vLLM HTTP server: many clients that leave, are preempted and reset.

First a server without offloading answers every prompt. Then one with kvtier (a
small DRAM, a bounded ``disk`` tier and an ``fs`` tier; a KV cache of its own so
small that requests are preempted) serves clients that share prefixes, stream or
not, ask for several choices, and leave at random moments, while the caches are
reset. No request may fail, every token must be the reference's, no counter may
fall, and the server must live. Then the clients stop: everything comes to rest,
and the gauges of what is under way are zero. Needs vLLM and aiohttp.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import LlamaConfig, LlamaForCausalLM

from stress.engine.clients import Clients, Question, answer_all, make_questions
from stress.engine.vllm_server import Server, server
from stress.failure import Failure

if TYPE_CHECKING:
    from pathlib import Path

    from stress.arguments import Arguments

BLOCK_BYTES = 65_536  #: K and V, four layers, two heads of 32 float32, for 32 tokens
DRAM_BLOCKS = 64
DISK_BLOCKS = 256
SCRAPE_S = 1.0
RESET_S_MAX = 20.0  #: between two of them tiers must get something to read
REST_S_MAX = 300.0
STALL_S_MAX = 300.0  #: without a single token, though clients wait
PATIENT = dict.fromkeys(("probe_timeout_s", "promote_timeout_s", "store_timeout_s"), 60.0)
"""A busy machine is not what is tested: a tier that misses its deadline is bypassed."""

QUERIES = ("", "?reset_external=true", "?reset_running_requests=true&reset_external=true")
BUSY_RESET = "Failed to reset KV cache even when all the running requests are"
"""vLLM's own refusal to throw back requests whose KV is on its way."""

NOT_ZERO_AT_REST = re.compile(
    r"""
    vllm:\w*config_info\{ | vllm:engine_sleep_state\{ | vllm:lora_requests_info\{
    | kvtier:tier_backend\{ | kvtier:primary_slots\{state="(free|ready)"\}
    | process_ | python_ | http_
    """,
    re.VERBOSE,
)
"""Gauges that say what there is. All others say what is under way."""


def metrics_of(text: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return all that only grows, and all gauges, as name and labels → value."""
    growing: dict[str, float] = {}
    gauges: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = ",".join(
                f'{name}="{value}"'
                for name, value in sorted(sample.labels.items())
                if name not in ("engine", "model_name")
            )
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            (gauges if family.type == "gauge" else growing)[name] = float(sample.value)
    return growing, gauges


class Watch:
    """Scrapes ``/metrics`` and sees that counters only grow."""

    def __init__(self, running: Server) -> None:
        self.growing: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self._server = running

    async def scrape(self) -> None:
        """Scrape once. Raises ``Failure`` if a counter or a histogram fell or went away."""
        self._server.assert_alive()
        growing, self.gauges = metrics_of(await self._server.text("/metrics"))
        for name, value in self.growing.items():
            if growing.get(name, -1.0) < value:
                raise Failure(f"{name} fell from {value:g} to {growing.get(name)}")
        self.growing = growing

    async def watch(self) -> None:
        """Scrape until cancelled. Raises ``Failure`` if nothing goes on.

        How long a request takes depends on the machine; that one of them gets on, doesn't.
        """
        tokens, since_s = -1.0, 0.0
        while True:
            await self.scrape()
            if self.total("vllm:generation_tokens") != tokens:
                tokens, since_s = self.total("vllm:generation_tokens"), time.monotonic()
            elif time.monotonic() - since_s > STALL_S_MAX:
                raise Failure(f"no token for {STALL_S_MAX:g} s: {self.not_at_rest()}")
            await asyncio.sleep(SCRAPE_S)

    def total(self, name: str) -> float:
        """Return the sum of a counter over its labels."""
        return sum(
            value
            for each, value in self.growing.items()
            if each.partition("{")[0].removesuffix("_total") == name
        )

    def not_at_rest(self) -> dict[str, float]:
        """Return the gauges that should be zero, and aren't."""
        return {
            name: value
            for name, value in self.gauges.items()
            if value and not NOT_ZERO_AT_REST.match(name)
        }


async def reset_now_and_then(running: Server, dice: random.Random, done: list[str]) -> None:
    """Reset the caches at random moments until cancelled."""
    while True:
        await asyncio.sleep(dice.uniform(0, RESET_S_MAX))
        query = dice.choice(QUERIES)
        async with running.session.post(f"{running.url}/reset_prefix_cache{query}") as answer:
            text = await answer.text()
            refused = answer.status == 500 and BUSY_RESET in running.log()
        if answer.status != 200 and not refused:
            raise Failure(f"/reset_prefix_cache{query}: {answer.status} {text}")
        done.append(query)


async def come_to_rest(running: Server, watch: Watch) -> None:
    """Wait until nothing is under way: idle requests make the engine publish its gauges."""
    end_s = time.monotonic() + REST_S_MAX
    while True:
        body = {"prompt": [3], "max_tokens": 1, "temperature": 0.0}
        async with running.session.post(f"{running.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise Failure(f"at rest: {answer.status} {await answer.text()}")
        await asyncio.sleep(SCRAPE_S)
        await watch.scrape()
        left = watch.not_at_rest()
        if not left:
            return
        if time.monotonic() > end_s:
            raise Failure(f"not at rest after {REST_S_MAX:g} s: {left}")


async def stress(running: Server, questions: list[Question], arguments: Arguments) -> list[str]:
    """Run the clients, come to rest, and return what to print. Raises ``Failure``."""
    dice = random.Random(arguments.seed)
    clients = Clients(running, questions, arguments.seed)
    watch = Watch(running)
    resets: list[str] = []
    try:
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(watch.watch()),
                group.create_task(reset_now_and_then(running, dice, resets)),
            ]
            work = group.create_task(clients.run(arguments.clients))
            await asyncio.wait([work], timeout=arguments.minutes * 60)
            clients.stop()
            await work
            for each in beside:
                each.cancel()
    except* Failure as failures:
        raise first_of(failures) from None
    await come_to_rest(running, watch)
    seen = {
        "preemptions": watch.total("vllm:num_preemptions"),
        "blocks read from disk tiers": watch.total("vllm:kv_offload_tiering_read_bytes")
        // BLOCK_BYTES,
        "blocks loaded": watch.total("vllm:kv_offload_load_bytes") // BLOCK_BYTES,
        "evictions": watch.total("kvtier:primary_evictions"),
    }
    never = [name for name, count in seen.items() if not count]
    if never:
        raise Failure(f"the run shows nothing, there were none: {', '.join(never)}")
    return [
        f"{dict(clients.counts)}, {len(resets)} resets",
        str({name: int(count) for name, count in seen.items()}),
    ]


def first_of(failures: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first failure of tasks that ran side by side."""
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


def check_log(log: str) -> None:
    """Raise ``Failure`` for a traceback that is not vLLM's own refusal to reset."""
    for each in re.split(r"(?=Traceback \(most recent call last\))", log)[1:]:
        if BUSY_RESET not in each:
            raise Failure(f"a traceback in the server's log: {each[:4000]}")


async def run(folder: Path, arguments: Arguments) -> list[str]:
    """Do all of it. Raises ``Failure``."""
    model = make_model(folder / "model")
    questions = make_questions(arguments.seed)
    engine_id = f"kvtier-stress-{os.getpid()}"
    async with server(model, None, folder / "reference.log", engine_id) as reference:
        say(f"{len(questions)} prompts without offloading")
        await answer_all(reference, questions)
        await reference.stop()
    disk_bytes = DISK_BLOCKS * BLOCK_BYTES
    tiers = [
        {"type": "disk", "path": str(folder / "disk"), "capacity_bytes": disk_bytes, **PATIENT},
        {"type": "fs", "root_dir": str(folder / "fs"), **PATIENT},
    ]
    config = {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": DRAM_BLOCKS * BLOCK_BYTES,
        "offload_prompt_only": False,
        # The weights stay the same, so both are right; a kept generation is read more often.
        "on_reset": ("new_generation", "keep")[arguments.seed % 2],
        "secondary_tiers": tiers,
    }
    async with server(model, config, folder / "server.log", engine_id) as running:
        say(f"{arguments.clients} clients, {arguments.minutes:g} minutes")
        at_start = len(running.log())  # vLLM misses its tokenizer before that, and says so
        lines = await stress(running, questions, arguments)
        check_log(running.log()[at_start:])
        await running.stop()
    left = [name for name in os.listdir("/dev/shm") if engine_id in name]  # noqa: PTH208, S108
    if left:
        raise Failure(f"left in shared memory: {left}")
    return lines


def make_model(folder: Path) -> Path:
    """Write a small Llama with random weights; no download."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    )
    make: Any = LlamaForCausalLM
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)  # spreads the logits, so that ties are rare
    model.save_pretrained(folder)
    return folder


def say(text: str) -> None:
    """Print at once."""
    print(f"stress: {text}", flush=True)
