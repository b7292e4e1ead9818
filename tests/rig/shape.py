"""What a scenario is made of, drawn from its seed. It is printed with each failure."""

from __future__ import annotations

from dataclasses import dataclass, fields
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
)
RELEASE = tuple(int(part) for part in vllm.__version__.split(".")[:2])


@dataclass(frozen=True)
class Shape:
    """One engine, its tiers, and how much is asked of it."""

    kinds: tuple[str, ...] = ("full",)  #: of KV-cache groups, see ``layers.py``
    layers_each: int = 1
    blocks_per_chunk: int = 1  #: vLLM blocks in one of kvtier's
    asynchronous: bool = False
    gpu_blocks: int = 10  #: more than one request of full length needs
    slots: int = 30
    running_max: int = 4
    batched_tokens_max: int = 32
    prompt_tokens_max: int = 56
    output_tokens_max: int = 8
    requests: int = 20
    families: int = 4  #: of prompts that share a prefix
    laziness: float = 0.5  #: of the device's streams, see ``device.py``
    tier_laziness: float = 0.5  #: of tiers, see ``stepped_tiers.py``
    tiers: tuple[dict[str, Any], ...] = ()
    eviction_policy: str = "reuse"
    aborts: float = 0.0  #: chance a step
    forgets: float = 0.0  #: vLLM's own prefix cache is reset, and no connector
    resets: float = 0.0
    updates: float = 0.0  #: of the weights
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
    return Shape(
        kinds=rng.choice(KINDS),
        blocks_per_chunk=rng.choice([1, 1, 2, 3]),
        asynchronous=rng.choice([False, True]),
        eviction_policy=rng.choice(["lru", "lru", "s3fifo", "reuse"]),
        layers_each=rng.choice([1, 1, 2]),
        gpu_blocks=rng.choice([0, 0, 4, 20]),
        slots=rng.choice([1, 2, 5, 8, 13, 20, 40, 70, 100]),
        running_max=rng.choice([1, 2, 4, 8]),
        batched_tokens_max=rng.choice([8, 16, 64]),
        requests=rng.randrange(6, 24),
        families=rng.randrange(1, 9),
        laziness=rng.choice([0.1, 0.5, 0.9]),
        tier_laziness=rng.choice([0.1, 0.5, 0.9]),
        tiers=({"type": "memory", "capacity_bytes": 4096 * rng.choice([4, 20, 1000])},),
        aborts=rng.choice([0.0, 0.1]),
        forgets=rng.choice([0.0, 0.1, 0.3]),
        names=rng.choice([3, 1000]),
    )
