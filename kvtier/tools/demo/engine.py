"""Runs one engine of the demo in a process of its own, through phases, and reports figures.

``kvtier.tools.demo`` starts it with a JSON job. For each phase it prints one line that begins
with ``{"phase":``; all its other output is log.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, Final

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.inputs import TokensPrompt

from kvtier.tools.demo.model import DEMO_SHAPE, VOCABULARY, make_model

BLOCK_TOKENS: Final = 32
#: keys and values of one block in float32; what one block of kvtier holds
BLOCK_BYTES: Final = (
    2 * DEMO_SHAPE.layers * DEMO_SHAPE.kv_heads * DEMO_SHAPE.head_size * BLOCK_TOKENS * 4
)
SEED: Final = 2026
SETTLE_TIMEOUT_S: Final = 60.0
SAMPLING: Final = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)

_COUNTERS: Final = {
    "vllm:kv_offload_store_bytes": "gpu_to_dram_bytes",
    "vllm:kv_offload_load_bytes": "dram_to_gpu_bytes",
    "vllm:kv_offload_tiering_write_bytes": "dram_to_tier_bytes",
    "vllm:kv_offload_tiering_read_bytes": "tier_to_dram_bytes",
}


def main() -> None:
    """Run the job in ``argv[1]``."""
    job = json.loads(sys.argv[1])
    model = Path(job["model"])
    if not model.exists():
        make_model(model)
    # Room for two prompts, so that the engine's own prefix cache cannot serve them all.
    llm = start_engine(job, num_gpu_blocks_override=70, max_model_len=2048)
    prompts = make_prompts(job["prompts"], job["prompt_tokens"], SEED)
    # A first request pays for the engine's own warm-up; another seed, so that no tier has it.
    # It is stored before a phase begins (``settle``), and a disk tier has announced its earlier
    # blocks by then, so the phase finds all of them.
    generate(llm, make_prompts(1, job["prompt_tokens"], SEED + os.getpid())[0])
    for name, empties_dram in job["phases"].items():
        figures = run_phase(llm, prompts, empties_dram=empties_dram)
        # On a new line: earlier output may have left its line unfinished.
        print("\n" + json.dumps({"phase": name, **figures}), flush=True)
    llm.llm_engine.engine_core.shutdown()


def make_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of random token ids, the same for the same seed."""
    choose = random.Random(seed)  # noqa: S311 - not for secrets
    return [[choose.randrange(3, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def start_engine(job: dict[str, Any], block_tokens: int = BLOCK_TOKENS, **sizes: int) -> LLM:
    """Start vLLM with kvtier on a job's ``model``, as its ``extra_config`` has it.

    ``engine_id``: in the job, if the caller needs to know it; ``connector``: if it is not kvtier's.
    ``sizes``: other limits of the engine.
    """
    return LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=block_tokens,
        disable_log_stats=False,
        seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector=job.get("connector", "OffloadingConnector"),
            kv_role="kv_both",
            kv_connector_extra_config=job["extra_config"],
            engine_id=job.get("engine_id"),
        ),
        **sizes,
    )


def run_phase(llm: LLM, prompts: list[list[int]], *, empties_dram: bool) -> dict[str, Any]:
    """Run all prompts once, one after the other, and return the phase's figures.

    The engine's own prefix cache is emptied before, and DRAM too if ``empties_dram``.
    """
    before = settle(llm)
    if not llm.reset_prefix_cache(reset_connector=empties_dram):
        raise SystemExit("the caches could not be emptied")
    outputs = [generate(llm, prompt) for prompt in prompts]
    after = settle(llm)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached_tokens": sum(int(output.num_cached_tokens or 0) for output in outputs),
        "first_token_s": [output.metrics.first_token_latency for output in outputs],
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": BLOCK_BYTES,
        **{name: after[name] - before[name] for name in after},
    }


def generate(llm: LLM, prompt: list[int]) -> Any:  # noqa: ANN401 - vLLM's
    """Return vLLM's output for one prompt, greedily sampled."""
    return llm.generate([TokensPrompt(prompt_token_ids=prompt)], SAMPLING, use_tqdm=False)[0]


def settle(llm: LLM) -> dict[str, float]:
    """Step the engine until all blocks in DRAM are in the tier too.

    Returns the bytes moved each way since the engine started.
    """
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        # Makes an idle engine step and publish its counters. No tier sees less than a block.
        generate(llm, [3])
        moved = dict.fromkeys(_COUNTERS.values(), 0.0)
        for metric in llm.get_metrics():
            if metric.name in _COUNTERS:
                moved[_COUNTERS[metric.name]] += getattr(metric, "value", 0.0)
        if moved["dram_to_tier_bytes"] >= moved["gpu_to_dram_bytes"]:
            return moved
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the tier did not keep up: {moved}")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
