"""A real vLLM engine with kvtier, in this process, and what a test asks of it.

Scenarios that use it run in processes of their own: ``tests/vllm/support/children.py``.
This folder must not become a package: it would hide vLLM itself.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from tests.support.patience import PATIENCE_S
from tests.vllm.support.models import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

TEST_RUN = "KVTIER_TEST_RUN"  #: set for the whole session, scenarios' processes too
BLOCK_TOKENS = 32  #: the CPU attention backend wants a multiple of 32
PATIENT = dict.fromkeys(
    ("probe_timeout_s", "promote_timeout_s", "store_timeout_s", "startup_connect_timeout_s"),
    PATIENCE_S,
)
CONNECTOR = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
METRICS = ("vllm:kv_offload", "kvtier:", "vllm:num_preemptions")


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
    transfer_params: list[Any] = field(default_factory=list)  #: what a connector gave back

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form that scenarios hand back."""
        return dict(vars(self))


class Engine:
    """A running engine with the offloading connector, in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        transfer_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> Round:
        """Generate greedily from every prompt, all submitted at once.

        ``transfer_params``: of all requests, or of each.
        """
        started_s = time.monotonic()
        each = isinstance(transfer_params, list)
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [greedy(max_tokens, params) for params in transfer_params]
            if each
            else greedy(max_tokens, transfer_params),
            use_tqdm=False,
        )
        return Round(
            tokens=[list(output.outputs[0].token_ids) for output in outputs],
            cached=[int(output.num_cached_tokens or 0) for output in outputs],
            seconds=time.monotonic() - started_s,
            first_token_s=[
                output.metrics.first_token_latency for output in outputs if output.metrics
            ],
            transfer_params=[output.kv_transfer_params for output in outputs],
        )

    def run_one_by_one(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        transfer_params: Mapping[str, Any] | None = None,
    ) -> Round:
        """Generate from one prompt after the other, so that no two share a batch."""
        rounds = [self.run([prompt], max_tokens, transfer_params) for prompt in prompts]
        return Round(
            tokens=[entry.tokens[0] for entry in rounds],
            cached=[entry.cached[0] for entry in rounds],
            seconds=sum(entry.seconds for entry in rounds),
            first_token_s=[value for entry in rounds for value in entry.first_token_s],
            transfer_params=[entry.transfer_params[0] for entry in rounds],
        )

    def step(self, count: int = 1) -> None:
        """Run idle engine steps, which is what moves jobs on."""
        for _ in range(count):
            self.llm.llm_engine.step()

    def settle(self) -> dict[str, Any]:
        """Step until no tier has anything to end in time; return kvtier's statistics.

        The one-token prompt at the end publishes the counters. It is shorter than
        a block, so that no tier sees it.
        """
        self.idle()
        self.run([[3]], max_tokens=1)
        self.idle()
        return self.statistics()

    def idle(self) -> None:
        """Step until the engine has nothing to do."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.core().scheduler.has_requests():
            self.step()
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not at rest after {PATIENCE_S} s: {self.statistics()}")

    def statistics(self) -> dict[str, Any]:
        """Return ``facade.statistics()`` as JSON values."""
        return to_builtins(self.manager().facade.statistics())

    def forget(self) -> None:
        """Empty the engine's own prefix cache, and only that."""
        assert self.llm.reset_prefix_cache()

    def empty_dram(self) -> None:
        """Empty the primary tier, and no other (in-process engines only)."""
        facade = self.manager().facade
        facade.reset()
        facade.on_reset_flushed()

    def core(self) -> Any:
        """Return the engine core (in-process engines only)."""
        return self.llm.llm_engine.engine_core.engine_core

    def connector(self) -> Any:
        """Return the scheduler's side of kvtier's connector (in-process engines only)."""
        connector = self.core().scheduler.get_kv_connector()
        return getattr(connector, "sub_connectors", [connector])[-1]

    def manager(self) -> Any:
        """Return the offloading manager (in-process engines only)."""
        return self.connector().connector_scheduler.manager

    def metrics(self) -> dict[str, float]:
        """Return what Prometheus sees, without the labels that all have: ``name{tier="1:fs"}``."""
        from prometheus_client import REGISTRY

        return flat_metrics(REGISTRY.collect())


def flat_metrics(families: Iterable[Any]) -> dict[str, float]:
    """Return samples of counters and gauges, and sums and counts of histograms."""
    found: dict[str, float] = {}
    for family in families:
        if not family.name.startswith(METRICS):
            continue
        for sample in family.samples:
            if sample.name.endswith(("_created", "_bucket")):
                continue
            labels = ",".join(
                f'{name}="{value}"'
                for name, value in sorted(sample.labels.items())
                if name not in ("engine", "model_name")
            )
            name = sample.name.removesuffix("_total")
            found[f"{name}{{{labels}}}" if labels else name] = float(sample.value)
    return found


def greedy(max_tokens: int, transfer_params: Mapping[str, Any] | None = None) -> Any:
    """Return sampling parameters that give the same tokens for the same logits."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args=transfer_params and {"kv_transfer_params": dict(transfer_params)},
    )


@contextmanager
def engine(
    model: str,
    extra_config: Mapping[str, Any] | None,
    *,
    blocks: int = 70,
    before: Sequence[Mapping[str, Any]] = (),
    **settings: Any,
) -> Iterator[Engine]:
    """Start an engine and shut it down. ``extra_config`` None runs without a connector.

    ``before``: other connectors, which a ``MultiConnector`` asks before kvtier's.

    ``blocks`` is the engine's own KV cache in blocks of 32 tokens: small, so that
    the prefix cache forgets and hits must come from the tiers.
    """
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if extra_config is not None:
        engine_id = settings.pop("engine_id", None)
        is_own = engine_id is None or os.environ.get(TEST_RUN, "") in engine_id
        assert is_own, f"another run beside this one has {engine_id!r}, too: use own_id of play.py"
        ours = {**CONNECTOR, "kv_connector_extra_config": dict(extra_config)}
        if before:
            ours = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [*before, ours]},
            }
        settings["kv_transfer_config"] = KVTransferConfig(
            **ours, **({} if engine_id is None else {"engine_id": engine_id})
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


def kvtier_config(**options: Any) -> dict[str, Any]:
    """Return the two lines that choose kvtier, and the given keys.

    Tiers that are given no deadlines get patient ones: beside other work, a sound
    tier would miss those that serve users best, and be a miss to the engine. What tiers
    have is loaded: whether that is faster on a busy machine is not for a test to say.
    """
    tiers = options.get("secondary_tiers")
    if isinstance(tiers, list):
        options["secondary_tiers"] = [
            PATIENT | tier if isinstance(tier, dict) else tier for tier in tiers
        ]
    return {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": 64 << 20,
        "load_policy": "always",
        **options,
    }


def vllms_config(cpu_bytes: int, *tiers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that choose vLLM's own tiering, with a worker for the CPU.

    ``tiers``: of kvtier's, as its secondary tiers.
    """
    inside = {"type": "KVTierSecondaryTier", "module_path": "kvtier.vllm"}
    return {
        "spec_name": "VLLMTieringOnCPUSpec",
        "spec_module_path": "stress.bench.sides",
        "cpu_bytes_to_use": cpu_bytes,
        "secondary_tiers": [{**inside, "tier": dict(tier)} for tier in tiers],
    }
