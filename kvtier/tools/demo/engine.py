"""One engine of the demo, in a process of its own: runs phases, reports figures.

``kvtier.tools.demo`` starts it with a JSON job and a pipe. Each line it writes to
the pipe is a JSON object: ``{"say": text}`` while it works, then one
``{"phase": ...}`` a phase. Everything else it prints is log.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.inputs import TokensPrompt

BLOCK_TOKENS = 32
LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 4, 4, 2, 64, 512
#: keys and values of one block in float32; what one block of kvtier holds
BLOCK_BYTES = 2 * LAYERS * KV_HEADS * HEAD_SIZE * BLOCK_TOKENS * 4
SETTLE_TIMEOUT_S = 60.0

_COUNTERS = {
    "gpu_to_dram_bytes": "vllm:kv_offload_store_bytes",
    "dram_to_gpu_bytes": "vllm:kv_offload_load_bytes",
    "dram_to_tier_bytes": "vllm:kv_offload_tiering_write_bytes",
    "tier_to_dram_bytes": "vllm:kv_offload_tiering_read_bytes",
}


def main() -> None:
    """Run the job in ``argv[1]``; report to the file descriptor in ``argv[2]``."""
    job, pipe = json.loads(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(pipe, False)  # noqa: FBT003 - its only argument
    with os.fdopen(pipe, "w", buffering=1) as out:

        def report(line: dict[str, Any]) -> None:
            out.write(json.dumps(line) + "\n")

        model = Path(job["model"])
        if not model.exists():
            report({"say": "making a small Llama with random weights"})
            make_model(model)
        report({"say": f"starting a vLLM engine (process {os.getpid()})"})
        run = DemoRun(job)
        prompts = make_prompts(job["prompts"], job["prompt_tokens"], job["seed"])
        # A first request pays for the engine's own warm-up; another seed, so that no tier has it.
        # It is stored before a phase begins (``settle``), and a disk tier tells what it has from
        # before ahead of that: the phase finds all of it.
        run.generate(make_prompts(1, job["prompt_tokens"], job["seed"] + os.getpid())[0])
        for phase in job["phases"]:
            name = phase["name"]
            report({"say": f"{name}: {len(prompts)} prompts of {job['prompt_tokens']} tokens"})
            figures = run.phase(prompts, empties_dram=phase["empties_dram"])
            report({"phase": name, **figures})
        run.llm.llm_engine.engine_core.shutdown()


class LlamaShape(NamedTuple):
    """How large a Llama is."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tokens_max: int


DEMO_SHAPE = LlamaShape(LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, 4096)


def make_model(folder: Path, shape: LlamaShape = DEMO_SHAPE) -> None:
    """Save a Llama with random weights; no download."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.heads * shape.head_size,
        intermediate_size=4 * shape.heads * shape.head_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.tokens_max,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM
    model(config).save_pretrained(folder)


def make_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of random token ids, the same for the same seed."""
    choose = random.Random(seed)  # noqa: S311 - not for secrets
    return [[choose.randrange(3, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def start_engine(job: dict[str, Any], block_tokens: int = BLOCK_TOKENS, **sizes: int) -> LLM:
    """Start vLLM with kvtier on a job's ``model``, as its ``extra_config`` has it.

    ``engine_id``: in the job, if it is to be known. ``sizes``: what else bounds the engine.
    """
    named = {"engine_id": job["engine_id"]} if "engine_id" in job else {}
    return LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=block_tokens,
        disable_log_stats=False,
        seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=job["extra_config"],
            **named,
        ),
        **sizes,
    )


class DemoRun:
    """The engine, and what the demo reads from it."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._output_tokens = job["output_tokens"]
        # Room for two prompts, so that the engine's own prefix cache cannot serve them all.
        self.llm = start_engine(job, num_gpu_blocks_override=70, max_model_len=2048)

    def generate(self, prompt: list[int], output_tokens: int | None = None) -> Any:  # noqa: ANN401
        """Return vLLM's output for one prompt, greedily sampled."""
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens or self._output_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        return self.llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)[
            0
        ]

    def phase(self, prompts: list[list[int]], *, empties_dram: bool) -> dict[str, Any]:
        """Run all prompts once, one after the other, and return the phase's figures.

        The engine's own prefix cache is emptied before, and DRAM too if ``empties_dram``.
        """
        self.settle()
        if not self.llm.reset_prefix_cache(reset_connector=empties_dram):
            raise SystemExit("the caches could not be emptied")
        before = self.counters()
        outputs = [self.generate(prompt) for prompt in prompts]
        self.settle()
        after = self.counters()
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "prompt_tokens": sum(map(len, prompts)),
            "cached_tokens": sum(int(output.num_cached_tokens or 0) for output in outputs),
            "first_token_s": [output.metrics.first_token_latency for output in outputs],
            "block_tokens": BLOCK_TOKENS,
            "block_bytes": BLOCK_BYTES,
            **{name: after[name] - before[name] for name in _COUNTERS},
        }

    def settle(self) -> None:
        """Step the engine until all that was stored in DRAM is in the tier too.

        A one-token prompt is what makes an idle engine step and publish its
        counters; it is shorter than a block, so no tier sees it.
        """
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            self.generate([3], output_tokens=2)
            counters = self.counters()
            if counters["dram_to_tier_bytes"] >= counters["gpu_to_dram_bytes"]:
                return
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the tier did not keep up: {counters}")
            time.sleep(0.01)

    def counters(self) -> dict[str, float]:
        """Return bytes moved each way since the engine started."""
        found = dict.fromkeys(_COUNTERS, 0.0)
        names = {metric: name for name, metric in _COUNTERS.items()}
        for metric in self.llm.get_metrics():
            if metric.name in names:
                found[names[metric.name]] += getattr(metric, "value", 0.0)
        return found


if __name__ == "__main__":
    main()
