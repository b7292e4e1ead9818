"""What a scenario is made of, drawn from its seed. It is printed with each failure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import vllm

if TYPE_CHECKING:
    import random

KINDS = (
    ("full",),
    ("mla",),
    ("window:8",),
    ("full", "window:8"),
    ("full", "window:6", "window:17"),
    ("full", "mamba"),
    ("full", "window:8", "mamba"),
    ("mla", "mamba"),
    ("full", "window:4"),
    ("full", "half:9"),
    ("full", "quarter:16", "window:8"),
)
_PART = {
    "ranks": 1,
    "stages": 1,
    "contexts": 1,
    "canonical": False,
    "blocks_per_chunk": 1,
    "drafts": (),
    "unit": None,
    "events": False,
}
PARTS: dict[str, dict[str, Any]] = {
    name: {**_PART, **focus}
    for name, focus in {
        "pages of three sizes, side by side": {
            "kinds": ("full", "quarter:16", "window:8"),
            "layout": "BLHNC",
            "layers_each": 2,
        },
        "the same of two ranks": {"kinds": ("full", "half:9"), "layout": "BLHNC", "ranks": 2},
        "states beside them": {"kinds": ("full", "half:9", "mamba"), "layout": "BLHNC"},
        "two layers and one": {"kinds": ("full",) * 2 + ("window:8",) * 3},
        "two layers and one, side by side": {
            "kinds": ("full",) * 2 + ("window:8",) * 3,
            "layout": "BLHNC",
        },
        "two layers and one, of two ranks": {
            "kinds": ("full",) * 2 + ("window:8",) * 3,
            "ranks": 2,
        },
    }.items()
}
"""Shapes with groups that have a part of a slot, by name. What they do not say is drawn."""
RELEASE = tuple(int(part) for part in vllm.__version__.split(".")[:2])


@dataclass(frozen=True)
class Shape:
    """One engine, its tiers, and how much is asked of it."""

    kinds: tuple[str, ...] = ("full",)  #: of KV-cache groups, see ``layers.py``
    layers_each: int = 1
    layout: str = (
        "LBHNC"  #: vLLM's, of KV caches: with BLHNC all layers of a block lie side by side
    )
    drafts: tuple[int, ...] = ()  #: groups that hold a draft model's layers, as with EAGLE
    blocks_per_chunk: int = 1  #: vLLM blocks in one of kvtier's
    unit: int | None = None  #: vLLM's ``prefix_match_unit``, in tokens: hits may end within a block
    retention: int | None = 0  #: vLLM's ``prefix_cache_retention_interval``, in tokens
    ranks: int = 1  #: of tensor parallelism
    contexts: int = 1  #: of decode context parallelism: ranks that share the tokens out
    stages: int = 1  #: of pipeline parallelism, each with ``layers_each`` layers of each group
    canonical: bool = False  #: vLLM's ``canonical_layout``
    asynchronous: bool = False
    gpu_blocks: int = 10  #: more than one request of full length needs
    slots: int = 30
    running_max: int = 4
    batched_tokens_max: int = 32
    prompt_tokens_max: int = 56
    output_tokens_max: int = 8
    requests: int = 20
    lives: int = 1  #: engines, one after the other, over the same folders
    families: int = 4  #: of prompts that share a prefix
    laziness: float = 0.5  #: of the device's streams, see ``device.py``
    tier_laziness: float = 0.5  #: of tiers, see ``stepped_tiers.py``
    tiers: tuple[dict[str, Any], ...] = ()
    eviction_policy: str = "reuse"
    aborts: float = 0.0  #: chance a step
    arrivals: float = 0.4  #: chance of a request a step
    forgets: float = 0.0  #: vLLM's own prefix cache is reset, and no connector
    throws_back: bool = False  #: and running requests with it
    resets: float = 0.0
    updates: float = 0.0  #: of the weights, in one of several ways
    keeps: bool = False  #: ``on_reset: "keep"``, where the weights stay
    late_callers: float = 0.0  #: chance a step that a completion from before a reset comes
    asks: float = 0.0  #: chance of a request with parameters for the connector
    salted: bool = False  #: some requests have a salt of their own
    adapters: int = 0  #: of LoRA, of which a request may have one
    samples_max: int = 1  #: of one prompt: vLLM makes a request of each
    priorities: int = 1  #: of requests; with several, the last of the lowest is preempted first
    speculates: int = 0  #: tokens that are drafted after each step
    columns: bool = False  #: states of convolutions lie by columns, not by rows
    checkpoints: bool = False  #: Mamba layers keep a state from within a step, too
    sessions: float = 0.0  #: chance of a request whose prompt comes in parts, with outputs between
    caches: bool = True  #: vLLM keeps a prefix cache on the GPU
    chunks: int | None = 0  #: tokens of one prompt a step; 0: what there is room for; None: all
    skips: float = 0.0  #: chance of a request that reads no cache, as for the prompt's logprobs
    stops: float = 0.0  #: chance of a request that ends with a token, which nobody can foresee
    prompts_only: bool = True  #: no KV of outputs is offloaded
    decides: bool = False  #: ``load_policy: "auto"``
    events: bool = False  #: routers listen, see ``listening.py``
    options: tuple[tuple[str, Any], ...] = ()  #: more of kvtier's and vLLM's
    names: int = 1000  #: request ids to choose from: few are used again soon

    def __str__(self) -> str:
        """Return what is not as in the plainest shape."""
        plain = Shape()
        told = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(plain, each.name)
        ]
        return f"Shape({', '.join(told)})"


def draw_shape(rng: random.Random) -> Shape:
    """Draw a shape."""
    kinds = rng.choice(KINDS)
    lives = rng.choice([1, 1, 1, 2])
    samples_max = rng.choice([1, 1, 3])
    shape = Shape(
        kinds=kinds,
        ranks=1 if "mla" in kinds else rng.choice([1, 1, 2]),
        canonical=not {"mla", "mamba"} & set(kinds) and rng.random() < 0.3,
        lives=lives,
        # With a window, vLLM's connector stores chunks of several blocks with holes: it takes a
        # block that another request shares for one that has left the window. kvtier refuses such
        # an engine (kvtier/vllm/workarounds/windows.py).
        blocks_per_chunk=min(rng.choice([1, 1, 2, 3]), 1 if ":" in str(kinds) else 3),
        asynchronous=rng.choice([False, True]),
        eviction_policy=rng.choice(["lru", "lru", "arc", "reuse"]),
        layers_each=rng.choice([1, 1, 2]),
        gpu_blocks=rng.choice([0, 0, 2, 10]),
        slots=rng.choice([1, 3, 8, 13, 20, 40, 70, 100, 100]),
        running_max=rng.choice([1, 2, 4, 8]),
        batched_tokens_max=rng.choice([8, 16, 64]),
        requests=rng.randrange(5, 18) // (lives * (samples_max + 1) // 2),
        families=rng.randrange(1, 6),
        laziness=rng.choice([0.1, 0.5, 0.9]),
        tier_laziness=rng.choice([0.1, 0.5, 0.9]),
        tiers=tuple(draw_tier(rng) for _ in range(rng.choice([0, 1, 1, 2]))),
        aborts=rng.choice([0.0, 0.1]),
        forgets=rng.choice([0.0, 0.1, 0.3, 0.3]),
        arrivals=rng.choice([0.1, 0.4]),
        resets=rng.choice([0.0, 0.0, 0.05]),
        updates=rng.choice([0.0, 0.0, 0.05]),
        keeps=rng.random() < 0.3,
        late_callers=rng.choice([0.0, 0.0, 0.05, 0.3]),
        asks=rng.choice([0.0, 0.0, 0.3]),
        salted=rng.random() < 0.2,
        adapters=rng.choice([0, 0, 0, 2]),
        samples_max=samples_max,
        prompts_only=rng.random() < 0.5,
        events=kinds[0] in ("full", "mla") and rng.random() < 0.3,
        options=draw_options(rng),
        names=rng.choice([5, 1000]),
    )
    shape = replace(shape, throws_back=shape.names == 5, decides=rng.random() < 0.5)
    if rng.random() < 0.2:
        shape = replace(shape, drafts=(rng.randrange(len(kinds)),))
    if len(kinds) > 1:
        shape = replace(shape, unit=rng.choice([None, None, 1, 2]))
    if shape.unit is not None:
        # For a hit that ends within a block vLLM takes one block more than it has counted on.
        shape = replace(shape, gpu_blocks=200)
    intervals = [16, 32] if shape.blocks_per_chunk == 1 else [24, 24]  # of whole chunks
    shape = replace(shape, retention=rng.choice([0, 0, None, *intervals]))
    shape = replace(shape, sessions=rng.choice([0.0, 0.0, 0.3]))
    shape = replace(shape, priorities=rng.choice([1, 1, 3]))
    if shape.ranks == 2 and kinds == ("full",) and not shape.canonical:
        shape = replace(shape, contexts=rng.choice([1, 2]))
    if shape.ranks == 1 and not shape.canonical:
        shape = replace(shape, stages=rng.choice([1, 1, 1, 2]))
    shape = replace(shape, speculates=rng.choice([0, 0, 1, 3]))
    if "mamba" in kinds and shape.unit is None:
        # With a unit vLLM names the state at which a hit ends within a block as that of the whole
        # block, if the step that goes on from there keeps one further on: its own cache is wrong.
        shape = replace(shape, checkpoints=rng.random() < 0.5)
    shape = _draw_ways_to_ask(rng, shape)
    # Where chunks share hashes routers have too little to go by: docs/how-to/behind-llm-d.md.
    has_shared_hashes = shape.blocks_per_chunk > 1 or shape.unit is not None
    return replace(shape, events=False) if has_shared_hashes or not shape.caches else shape


def next_life(shape: Shape, rng: random.Random) -> Shape:
    """Draw what another engine over the same folders has otherwise: all that it may serve as is."""
    columns = "mamba" in shape.kinds and rng.random() < 0.3
    # See ``_draw_ways_to_ask``.
    may_draft = not ("mamba" in shape.kinds and shape.sessions and shape.asynchronous)
    drafts = rng.choice([shape.speculates, shape.speculates, 0, 1, 3]) if may_draft else 0
    return replace(shape, columns=columns, speculates=drafts)


def _draw_ways_to_ask(rng: random.Random, shape: Shape) -> Shape:
    """Draw what requests are cut into, what they read, and how they end."""
    has_states = "mamba" in shape.kinds
    shape = replace(shape, skips=rng.choice([0.0, 0.0, 0.2]), stops=rng.choice([0.0, 0.5]))
    if has_states and shape.sessions and shape.asynchronous:
        # vLLM has run the state on with tokens that it drops when the next part comes: what is
        # read then is wrong with no connector's help.
        shape = replace(shape, stops=0.0, speculates=0)
    chunks = rng.choice([0, 0, 5, None])
    if chunks is None and not has_states:  # vLLM cuts prompts at states
        shape = replace(shape, chunks=None, batched_tokens_max=64)  # a step has room for any
    elif chunks and not shape.throws_back:  # else prompts are thrown back for ever
        shape = replace(shape, chunks=chunks)
    if not has_states and shape.unit is None:  # both need vLLM's prefix cache
        shape = replace(shape, caches=rng.random() < 0.8)
    return shape


def draw_options(rng: random.Random) -> tuple[tuple[str, Any], ...]:
    """Draw settings of the runtime."""
    options: dict[str, Any] = {"breaker_pause_s": 0.02, "breaker_pause_s_max": 0.1}
    if rng.random() < 0.1:
        options["store_threshold"] = 2
    if rng.random() < 0.2:
        options["lease_timeout_s"] = 0.02
    if rng.random() < 0.2:
        options["job_blocks_max"] = rng.choice([1, 3])
    if RELEASE >= (0, 33) and rng.random() < 0.3:
        options["sync_load_budget_bytes"] = rng.choice([1 << 10, 1 << 20])
    return tuple(options.items())


def draw_tier(rng: random.Random) -> dict[str, Any]:
    """Draw a tier, whose storage may fail."""
    kind = rng.choice(["memory"] * 6 + ["fs", "disk"])
    if kind == "fs":
        return {"type": "fs", "isolation": "thread", "direct": False}
    if kind == "disk":
        sizes = {"capacity_bytes": 4096 * rng.choice([100, 1000]), "region_bytes": 4096 * 8}
        return {"type": "disk", "isolation": "thread", "direct": False, **sizes}
    tier: dict[str, Any] = {
        "type": "memory",
        "capacity_bytes": 4096 * rng.choice([4, 20, 1000]),
        "eviction_policy": rng.choice(["lru", "reuse", "arc"]),
    }
    patience = rng.choice([1, 10])
    tier |= {
        "probe_timeout_s": 0.02 * patience,
        "promote_timeout_s": 0.04 * patience,
        "store_timeout_s": 0.04 * patience,
    }
    if rng.random() < 0.2:
        tier["offload_policy"] = "request_level"
    if rng.random() < 0.5:
        tier["faults"] = {
            operation: draw_faults(rng, operation)
            for operation in rng.sample(["probe", "load", "store", "remove"], rng.choice([1, 2]))
        }
    return tier


def draw_faults(rng: random.Random, operation: str) -> dict[str, Any]:
    """Draw what goes wrong with one operation of a tier."""
    kinds: list[dict[str, Any]] = [
        {"delay_s": rng.choice([0.003, 0.03])},
        {"delay_s": 0.5, "calls_max": 1},  # to what waits for it, it hangs
        {"error": "drawn", "calls_max": 3},
        {"fail_every": 3},
        {"answers_missing": 1, "calls_max": 2},
    ]
    if operation == "load":
        kinds.append({"corrupt_every": 3})
    if operation == "store":
        kinds.append({"full": True, "calls_max": 2})
    return {**rng.choice(kinds), "calls_skipped": rng.choice([0, 2])}
