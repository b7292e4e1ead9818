"""Runs scenarios on a real vLLM engine, each in a process of its own.

vLLM keeps state in module globals and environment variables, so a scenario is
a plain function at module level that a child process calls; its JSON result is
what the test looks at. ``python -m tests.vllm.engine`` is that child.

This folder must not become a package: it would hide vLLM itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

BLOCK_TOKENS = 32  #: the CPU attention backend wants a multiple of 32
VOCABULARY = 512
SCENARIO_TIMEOUT_S = 240.0
LOG_TAIL_CHARACTERS = 6000

_ROOT = Path(__file__).parents[2]
_CHILD_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# vLLM's own warnings are not ours to fix, so the child does not make errors of them.
_CHILD_FLAGS = ["-W", "ignore"]


class ScenarioError(AssertionError):
    """Raised when the child ended badly. The text ends with its log."""


def run_scenario(
    scenario: Callable[..., Any],
    *,
    log_folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = SCENARIO_TIMEOUT_S,
    **arguments: object,
) -> Any:
    """Call ``scenario(**arguments)`` in a new process and return its result.

    Arguments and result are JSON values. Raises ``ScenarioError`` if the child
    fails or takes longer than ``timeout_s``; it is killed then.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    stem = log_folder / f"{scenario.__name__}-{time.monotonic_ns()}"
    log_path, result_path = stem.with_suffix(".log"), stem.with_suffix(".json")
    source = sys.modules[scenario.__module__].__file__
    assert source is not None
    call = json.dumps(
        {
            "file": source,
            "function": scenario.__name__,
            "arguments": arguments,
            "result": str(result_path),
        }
    )
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, *_CHILD_FLAGS, "-m", "tests.vllm.engine", call],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_child_environment(environment or {}),
        )
        try:
            ended = str(child.wait(timeout_s))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            ended = f"none within {timeout_s} s"
    if ended != "0" or not result_path.exists():
        tail = log_path.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
        raise ScenarioError(f"{scenario.__name__}: exit status {ended}\n{tail}")
    return json.loads(result_path.read_text())


def _child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH", "")
    places = [str(_ROOT), str(_ROOT / "backends"), *filter(None, [inherited])]
    return {
        **os.environ,
        **_CHILD_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(places),
        **extra,
    }


def make_llama(folder: Path) -> Path:
    """Write a Llama of 4 layers with random weights: one KV-cache group."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            bos_token_id=1,
            eos_token_id=2,
        ),
        folder,
    )


def make_gemma(folder: Path) -> Path:
    """Write a Gemma 3 with sliding-window and full attention: two KV-cache groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return _save(
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 2,
            max_position_embeddings=4096,
            bos_token_id=1,
            eos_token_id=2,
            # Tied, a random Gemma only repeats its last token, whatever the cache holds.
            tie_word_embeddings=False,
        ),
        folder,
    )


def _save(model_class: Any, config: Any, folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Spread the logits: a tie would make equal runs give different tokens.
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder


def make_prompts(count: int, tokens: int, seed: int = 7) -> list[list[int]]:
    """Return ``count`` different prompts of ``tokens`` token ids."""
    choose = random.Random(seed)
    return [[choose.randrange(3, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


@dataclass
class Round:
    """What one pass over the prompts gave."""

    tokens: list[list[int]]
    cached: list[int]  #: tokens of each prompt that were not computed (``num_cached_tokens``)
    seconds: float
    first_token_s: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form that scenarios hand back."""
        return dict(vars(self))


class Engine:
    """A running engine with the offloading connector, in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def run(self, prompts: list[list[int]], max_tokens: int = 8) -> Round:
        """Generate greedily from every prompt, all submitted at once."""
        from vllm import SamplingParams

        started_s = time.monotonic()
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            ),
            use_tqdm=False,
        )
        return Round(
            tokens=[list(output.outputs[0].token_ids) for output in outputs],
            cached=[int(output.num_cached_tokens or 0) for output in outputs],
            seconds=time.monotonic() - started_s,
            first_token_s=[
                output.metrics.first_token_latency for output in outputs if output.metrics
            ],
        )

    def run_one_by_one(self, prompts: list[list[int]], max_tokens: int = 8) -> Round:
        """Generate from one prompt after the other, so that no two share a batch."""
        rounds = [self.run([prompt], max_tokens) for prompt in prompts]
        return Round(
            tokens=[entry.tokens[0] for entry in rounds],
            cached=[entry.cached[0] for entry in rounds],
            seconds=sum(entry.seconds for entry in rounds),
            first_token_s=[value for entry in rounds for value in entry.first_token_s],
        )

    def step(self, count: int = 1) -> None:
        """Run idle engine steps, which is what moves jobs on."""
        for _ in range(count):
            self.llm.llm_engine.step()

    def forget(self) -> None:
        """Empty the engine's own prefix cache, and only that."""
        assert self.llm.reset_prefix_cache()

    def connector(self) -> Any:
        """Return the scheduler's side of the connector (in-process engines only)."""
        core = self.llm.llm_engine.engine_core.engine_core
        return core.scheduler.get_kv_connector()

    def manager(self) -> Any:
        """Return the offloading manager (in-process engines only)."""
        return self.connector().scheduler.manager

    def metrics(self, prefix: str = "vllm:kv_offload") -> dict[str, float]:
        """Return counters, gauges and histogram sums as ``name{label="value"}``."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if not metric.name.startswith(prefix):
                continue
            labels = ",".join(
                f'{name}="{value}"'
                for name, value in sorted(metric.labels.items())
                if name not in ("engine", "model_name")
            )
            name = f"{metric.name}{{{labels}}}" if labels else metric.name
            value = metric.value if hasattr(metric, "value") else getattr(metric, "sum", None)
            if value is not None:
                found[name] = float(value)
        return found


@contextmanager
def engine(
    model: str,
    extra_config: Mapping[str, Any] | None,
    *,
    blocks: int = 70,
    **settings: Any,
) -> Iterator[Engine]:
    """Start an engine and shut it down. ``extra_config`` None runs without a connector.

    ``blocks`` is the engine's own KV cache in blocks of 32 tokens: small, so that
    the prefix cache forgets and hits must come from the tiers.
    """
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if extra_config is not None:
        engine_id = settings.pop("engine_id", None)
        settings["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=dict(extra_config),
            **({} if engine_id is None else {"engine_id": engine_id}),
        )
    llm = LLM(
        model=model,
        **{
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": blocks,
            "max_model_len": 2048,
            "max_num_batched_tokens": 4096,
            "disable_log_stats": False,
            "seed": 0,
            **settings,
        },
    )
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


def kvtier_config(**options: object) -> dict[str, Any]:
    """Return the two lines that choose kvtier, and the given keys."""
    return {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": 64 << 20,
        **options,
    }


def _child_main() -> None:
    call = json.loads(sys.argv[1])
    spec = importlib.util.spec_from_file_location("scenario", call["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scenario"] = module
    spec.loader.exec_module(module)
    result = getattr(module, call["function"])(**call["arguments"])
    Path(call["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    _child_main()
