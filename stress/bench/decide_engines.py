"""The engines of ``stress.bench decide``: one for each policy, side by side, in turns.

They differ in nothing but what is compared: one loads whatever its tier has, one has no
tier and so computes everything, and one decides. Each has a simulated tier of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from kvtier.tools.process_group import process_group
from stress.bench.children import (
    LOG_TAIL_LINES,
    QUIET_ENVIRONMENT,
    ChildFailed,
)
from stress.bench.decide_plan import (
    AUTO,
    BLOCK_BYTES,
    BLOCK_TOKENS,
    POLICIES,
    RECOMPUTE,
)
from stress.bench.leftovers import remove_regions
from stress.bench.rated_tier import TYPE_NAME, Rate, RateFile, register

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stress.bench.decide_plan import Plan

MODULE: Final = "stress.bench.decide_engine"
ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engines step themselves
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",  # tiers' threads get the other cores
}
HOST_FACTOR: Final = 1.5
"""Of what all clients ask for at once: room for kvtier's reserve for stores."""


class Engine:
    """One engine's process, as seen from here."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self._process = process
        self._log = log

    def wait_ready(self) -> None:
        """Wait until it is up. Raises ``ChildFailed``."""
        self._answer()

    def store(self, tokens: int, count: int) -> dict[str, Any]:
        """Have it compute and store this many prompts."""
        return self._ask(do="store", tokens=tokens, count=count)

    def serve(
        self, tokens: int, numbers: Sequence[int], turn: int, *, hangs: bool
    ) -> dict[str, Any]:
        """Have it asked for these prompts at once."""
        numbers = list(numbers)
        return self._ask(do="serve", tokens=tokens, numbers=numbers, turn=turn, hangs=hangs)

    def _ask(self, **order: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._failed()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._failed()
        found: dict[str, Any] = json.loads(line)
        return found

    def _failed(self) -> None:
        status = self._process.wait()
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        raise ChildFailed(MODULE, status, "\n".join(tail))


class Engines:
    """All of them, and the rate of their tiers."""

    def __init__(self, by_policy: dict[str, Engine], rate: RateFile) -> None:
        self.by_policy = by_policy
        self._rate_file = rate
        self._rate = Rate()

    def set_rate(self, rate: Rate) -> None:
        """Have all tiers go at this rate from now on."""
        self._rate = rate
        self._rate_file.write(rate)

    def serve(self, policy: str, tokens: int, numbers: Sequence[int], turn: int) -> dict[str, Any]:
        """Have one engine asked for prompts at once, while the others rest."""
        return self.by_policy[policy].serve(tokens, numbers, turn, hangs=self._rate.hangs)


@contextmanager
def start_engines(plan: Plan) -> Iterator[Engines]:
    """Start an engine for each policy; nothing is left of them when the block is left."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        register(folder / "site")
        (folder / "tmp").mkdir()  # engines are killed at the end: what they leave goes with it
        rate = RateFile(folder / "rate.json")
        rate.write(Rate())
        found = {}
        for policy in POLICIES:
            engine = stack.enter_context(_engine(policy, plan, folder))
            engine.wait_ready()  # one after the other: the first one makes the model
            found[policy] = engine
        yield Engines(found, rate)


@contextmanager
def _engine(policy: str, plan: Plan, folder: Path) -> Iterator[Engine]:
    engine_id = f"bench-{uuid.uuid4()}"
    job = {
        "model": str(folder / "model"),
        "engine_id": engine_id,
        "tokens_max": max(plan.prompts),
        "clients": max(plan.clients),
        "extra_config": _extra_config(policy, plan, folder / "rate.json"),
    }
    environment = {**QUIET_ENVIRONMENT, **ENVIRONMENT, "TMPDIR": str(folder / "tmp")}
    path = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile() as log:
        part = process_group(
            [sys.executable, "-W", "ignore", "-m", MODULE, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment, "PYTHONPATH": path},
        )
        try:
            with part as process:
                yield Engine(process, log)
        finally:
            remove_regions(engine_id)


def _extra_config(policy: str, plan: Plan, rate_file: Path) -> dict[str, Any]:
    blocks = sum(plan.prompts) // BLOCK_TOKENS * plan.prompts_stored
    host_blocks = max(plan.prompts) // BLOCK_TOKENS * max(plan.clients)
    tier = {
        "type": TYPE_NAME,
        "rate_file": str(rate_file),
        "capacity_bytes": (blocks + host_blocks) * BLOCK_BYTES,
    }
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
