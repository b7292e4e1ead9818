"""The engines of ``stress.bench decide``: one for each policy, side by side, in turns.

They differ in nothing but what is compared: one loads whatever its tier has, one has no
tier and so computes everything, and one decides. Each has a simulated tier of its own.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from stress.bench.children import Part, start_part
from stress.bench.decide_plan import AUTO, BLOCK_BYTES, BLOCK_TOKENS, POLICIES, RECOMPUTE
from stress.bench.engines import ENVIRONMENT, own_engine_id
from stress.bench.harness import own_folder
from stress.bench.rated_tier import TYPE_NAME, Rate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stress.bench.decide_plan import Plan

MODULE: Final = "stress.bench.decide_engine"
HOST_FACTOR: Final = 1.5
"""Of what all clients ask for at once: room for kvtier's reserve for stores."""


class Engines:
    """All of them, and the rate of their tiers."""

    def __init__(self, parts: dict[str, Part]) -> None:
        self._parts = parts
        self.rate = Rate()

    def store(self, tokens: int, count: int) -> None:
        """Have each compute and store this many prompts."""
        for part in self._parts.values():
            part.ask(tokens=tokens, count=count)

    def serve(self, policy: str, tokens: int, numbers: Sequence[int], turn: int) -> Any:  # noqa: ANN401 - JSON
        """Have one engine asked for prompts at once, while the others rest."""
        return self._parts[policy].ask(tokens=tokens, numbers=numbers, turn=turn, rate=self.rate)


@contextmanager
def start_engines(plan: Plan) -> Iterator[Engines]:
    """Start an engine for each policy; nothing is left of them when the block is left."""
    with ExitStack() as stack:
        folder = stack.enter_context(own_folder())
        (folder / "tmp").mkdir()  # engines are killed at the end: what they leave goes with it
        environment = {**ENVIRONMENT, "TMPDIR": str(folder / "tmp")}
        parts = {}
        for policy in POLICIES:
            job = {
                "model": str(folder / "model"),
                "engine_id": stack.enter_context(own_engine_id()),
                "tokens_max": max(plan.prompts),
                "clients": max(plan.clients),
                "extra_config": _extra_config(policy, plan),
            }
            parts[policy] = stack.enter_context(start_part(MODULE, job, environment))
            parts[policy].answer()  # one after the other: the first one makes the model
        yield Engines(parts)


def _extra_config(policy: str, plan: Plan) -> dict[str, Any]:
    blocks = sum(plan.prompts) // BLOCK_TOKENS * plan.prompts_stored
    host_blocks = max(plan.prompts) // BLOCK_TOKENS * max(plan.clients)
    tier = {"type": TYPE_NAME, "capacity_bytes": (blocks + host_blocks) * BLOCK_BYTES}
    return {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": int(HOST_FACTOR * host_blocks) * BLOCK_BYTES,
        "secondary_tiers": [] if policy == RECOMPUTE else [tier],
        "cascade_slots_fraction_max": 1.0,  # or one long prompt would not be stored to its end
        "load_policy": "auto" if policy == AUTO else "always",
        # The weights stay the same: what is in the tier is to be found after DRAM was emptied.
        "on_reset": "keep",
    }
