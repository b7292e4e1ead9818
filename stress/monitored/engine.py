"""The demo's engine on three tiers, in this process, and requests for it that repeat."""

from __future__ import annotations

import random
import time
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.demo.engine import BLOCK_BYTES, SEED, generate, make_prompts, start_engine
from kvtier.tools.demo.model import make_model

if TYPE_CHECKING:
    from pathlib import Path

    from vllm import LLM

DISK, FOLDER, SERVER = "ssd", "share", "cache"
PROMPT_TOKENS: Final = 1_000
PROMPTS: Final = 40
"""So many are in use at a time, the newer ones most."""

NEW_EVERY: Final = 12
"""After so many requests the oldest prompt goes out of use, and a new one comes."""

RARE, RARE_EVERY = 40, 4
"""So many others come in turns, one request in so many: the server alone still has them by then."""

BREATH_S: Final = 0.15
"""Between two requests, so that a run of minutes does not wear a tier out."""


def start(folder: Path, shared: Path, server: str) -> LLM:
    """Start it. ``shared``: the folder of its ``fs`` tier; ``server``: the URL of its Redis."""
    make_model(folder / "model")
    # A tier that hangs is tried again every second, so that a minute shows what an hour would.
    soon: dict[str, Any] = {"promote_timeout_s": 2, "store_timeout_s": 2, "probe_timeout_s": 1}
    tiers = [
        {"type": "disk", "name": DISK, "path": str(folder / "disk")},
        {"type": "fs", "name": FOLDER, "root_dir": str(shared)},
        {"type": "redis", "name": SERVER, "url": server},
    ]
    # The disk has what is used again soon, the folder what is new, and the server all of it: each
    # of them has loads.
    admission = {"policy": "second_touch", "remembered_blocks_max": 200}
    sizes: list[dict[str, Any]] = [
        {"capacity_bytes": 3_000 * BLOCK_BYTES, "admission": admission},
        {"capacity_bytes": 1_000 * BLOCK_BYTES},
        {},
    ]
    config = {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": 200 * BLOCK_BYTES,
        "breaker_pause_s_max": 1,
        "load_policy": "always",  # so small a model may be quicker than the tier
        "secondary_tiers": [
            {**tier, **size, **soon} for tier, size in zip(tiers, sizes, strict=True)
        ],
    }
    job = {"model": str(folder / "model"), "extra_config": config}
    return start_engine(job, num_gpu_blocks_override=70, max_model_len=2048)


class Load:
    """Requests, one after the other. One thread."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._choose = random.Random(SEED)
        self._weights = [*accumulate(1 / rank for rank in range(1, PROMPTS + 1))]
        self.requests = 0

    def send(self) -> Any:  # noqa: ANN401 - vLLM's
        """Send one request and return its output."""
        self.requests += 1
        if self.requests % RARE_EVERY:
            (rank,) = self._choose.choices(range(PROMPTS), cum_weights=self._weights)
            number = self.requests // NEW_EVERY - rank  # the new ones are asked for most
        else:
            number = -PROMPTS - (self.requests // RARE_EVERY) % RARE
        (prompt,) = make_prompts(1, PROMPT_TOKENS, SEED + number)
        time.sleep(BREATH_S)
        return generate(self._llm, prompt)
