"""What many scenarios do: play the same prompts again and again, and look.

Also the requests of an engine in this process, one step at a time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.patience import looks
from tests.vllm.support.engine import TEST_RUN, Engine, engine, greedy, make_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SHM = Path("/dev/shm")


def play(
    model: str,
    extra_config: Mapping[str, Any] | None,
    lengths: Sequence[int],
    rounds: int,
    max_tokens: int = 8,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Run prompts of these lengths ``rounds`` times in one engine, one by one.

    Between rounds the engine forgets its own prefix cache. Returns, for each
    round, what ``Round`` holds, the metrics and the statistics at its end.
    """
    prompts = prompts_of(lengths)
    with engine(model, extra_config, **settings) as running:
        return [play_round(running, prompts, max_tokens) for _ in range(rounds)]


def play_round(
    running: Engine, prompts: list[list[int]], max_tokens: int = 8, **arguments: Any
) -> dict[str, Any]:
    """Run the prompts once, with an empty prefix cache of the engine's own, and settle."""
    running.forget()
    result = running.run_one_by_one(prompts, max_tokens, **arguments)
    statistics = running.settle()
    return {
        **result.as_json(),
        "statistics": statistics,
        "metrics": running.metrics(),
        "block_bytes": running.manager()._memory.block_bytes,
    }


def prompts_of(lengths: Sequence[int], seed: int = 7) -> list[list[int]]:
    """Return one prompt of each length."""
    return [make_prompts(1, tokens, seed + 100 * n)[0] for n, tokens in enumerate(lengths)]


def whole_blocks(lengths: Sequence[int], block_tokens: int = 32) -> list[int]:
    """Return the tokens that hits may cover: whole blocks."""
    return [tokens // block_tokens * block_tokens for tokens in lengths]


def grown(rounds: Sequence[Mapping[str, Any]], number: int, metric: str) -> float:
    """Return how much a counter grew in round ``number``."""
    before = rounds[number - 1]["metrics"].get(metric, 0.0) if number else 0.0
    value: float = rounds[number]["metrics"].get(metric, 0.0) - before
    return value


def assert_at_rest(statistics: Mapping[str, Any]) -> None:
    """Promise 10: no requests and no jobs, so nothing is pinned or quarantined."""
    primary = statistics["primary"]
    assert primary["requests"] == 0, primary
    assert primary["pinned_slots"] == 0, primary
    assert primary["quarantined_slots"] == 0, primary
    assert primary["promotion_slots"] == 0, primary
    assert primary["free_slots"] + primary["ready_slots"] == primary["slot_count"], primary
    assert statistics["faults"] == 0
    for tier in statistics["tiers"]:
        assert tier["probes_in_flight"] == 0, tier
        assert tier["promotion_jobs_in_flight"] == 0, tier
        assert tier["cascade_jobs_in_flight"] == 0, tier
        assert tier["breaker"] == "CLOSED", tier


def own_id(name: str) -> str:
    """Return an engine id that no other run of these tests has: they may run side by side."""
    return f"{name}-{os.environ[TEST_RUN]}"


def ours_in_shm(engine_id: str) -> list[str]:
    """Return the names of the shared regions of one engine."""
    return sorted(path.name for path in SHM.iterdir() if engine_id in path.name)


class Steps:
    """Runs requests by single engine steps."""

    def __init__(self, running: Engine) -> None:
        self._engine = running.llm.llm_engine
        self._running = running
        self._internal: dict[str, str] = {}
        self.tokens: dict[str, list[int]] = {}  #: of the requests that have ended
        self.cached: dict[str, int] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int = 8) -> None:
        """Add a request."""
        self._internal[name] = self._engine.add_request(
            name, {"prompt_token_ids": prompt}, greedy(max_tokens)
        )

    def abort(self, *names: str) -> None:
        """Abort requests, wherever they are."""
        self._engine.abort_request([self._internal[name] for name in names], internal=True)

    def step(self) -> None:
        """Run one step and note who has ended."""
        for output in self._engine.step():
            if output.finished:
                self.tokens[output.request_id] = list(output.outputs[0].token_ids)
                self.cached[output.request_id] = int(output.num_cached_tokens or 0)

    def until(self, reached: Callable[[dict[str, Any]], bool]) -> None:
        """Step until kvtier's statistics say so."""
        for _ in looks(lambda: f"never reached: {self._running.statistics()}"):
            if reached(self._running.statistics()):
                return
            self.step()

    def finish(self) -> None:
        """Step until no request is left."""
        for _ in looks(lambda: f"requests that never end: {self._running.statistics()}"):
            if not self._engine.has_unfinished_requests():
                return
            self.step()
