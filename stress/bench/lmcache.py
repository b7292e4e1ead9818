"""``stress.bench lmcache``: the real engine with kvtier, then with LMCache's server, in turns.

LMCache's multi-process server has the DRAM tier (L1) and what is below it (L2) in a process of its
own; the engine's connector talks to it. kvtier has the DRAM tier in the engine, and each tier below
in a process of its own. Both get the same prompts, block size, bytes of DRAM, and disk or Valkey.

Each side of a run starts four engines (three with Valkey). The first computes the prompts, serves
them from DRAM, and is killed while it stores others. The second finds what is left; then the server
or the tier's process is killed, and LMCache's server is started again. The third is started after
that server has ended and started. Before the fourth, files are damaged. Processor time is that of
all processes together.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import InternalError, Misuse
from kvtier.tools.demo.engine import BLOCK_BYTES, BLOCK_TOKENS
from kvtier.tools.demo.model import DEMO_SHAPE
from kvtier.tools.terminal import progress, table
from stress.bench.disk import drop_from_page_cache
from stress.bench.driven_engine import LOOKUP_CALLS, SCHEDULER_CALLS, WORKER_CALLS
from stress.bench.harness import (
    PATH,
    RUNS,
    Option,
    Report,
    at_least_one,
    medians,
    orders,
    own_folder,
    ratio,
    ratio_cells,
    start_engine,
)
from stress.bench.lmcache_sides import (
    DISK_TIER,
    LMCACHE,
    REDIS_TIER,
    Side,
    Storage,
    damage,
    left_in_shared_memory,
    memory_mib,
    open_side,
    processes,
    processor_s,
)
from stress.bench.sides import KVTIER
from stress.children import ChildFailed
from stress.runtime.processes import living

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from stress.children import Part

SIDES: Final = (LMCACHE, KVTIER)

OPTIONS: Final = (
    PATH,
    RUNS._replace(default=3),
    Option("--tier", DISK_TIER, "what is below DRAM", choices=(DISK_TIER, REDIS_TIER)),
    Option("--l2", "fs", "LMCache's adapter for a disk", choices=("fs", "fs_native")),
    Option("--prompts", 16, "prompts in each phase", at_least_one),
    Option("--block-tokens", 256, "tokens in a block of either side", at_least_one),
)

LOADED_TOKENS: Final = 1024  #: of each prompt, which has one more: an engine computes the last one
OUTPUT_TOKENS: Final = 4
STEP_TOKENS_MAX: Final = 2_032
ENGINE_BLOCKS: Final = 320
IDLE_S: Final = 0.001  #: after a step without work, as vLLM has it in a process of its own
REST_S: Final = 3.0  #: in which nothing is asked of anybody
KILL_AFTER_S: Final = 0.5  #: of being given prompts whose blocks are to be stored
KILLED_S_MAX: Final = 330.0
"""For all prompts without a server: LMCache's connector waits 300 s for an answer, by default."""

RECOVERY_S: Final = 15.0  #: LMCache's connector looks for its server every 10 s

KNOWN, NEW = "known", "new"  #: prompts
COLD, DRAM, RESTARTED, DISK, REBOOTED = "cold", "DRAM", "restarted", "disk", "rebooted"
TORN, KILLED, AGAIN, DAMAGED = "torn", "killed", "again", "damaged"
MEASURED: Final = (COLD, DRAM, RESTARTED, DISK, REBOOTED)  #: must give the same tokens
PHASE_ROWS: Final = {
    "first token, computed, ms": (COLD, "first_token_ms"),
    "first token, from DRAM, ms": (DRAM, "first_token_ms"),
    "first token, from the tier below, ms": (DISK, "first_token_ms"),
    "first token, new engine, ms": (RESTARTED, "first_token_ms"),
    "first token, new engine and server, ms": (REBOOTED, "first_token_ms"),
    "lookup of a miss, scheduler's thread, us a block": (COLD, "lookup_us"),
    "lookup of a DRAM hit, scheduler's thread, us a block": (DRAM, "lookup_us"),
    "lookup in the tier below, scheduler's thread, us a block": (DISK, "lookup_us"),
    "store, scheduler's other calls, us a block": (COLD, "scheduler_us"),
    "store, worker's calls, us a block": (COLD, "worker_us"),
    "load from DRAM, scheduler's other calls, us a block": (DRAM, "scheduler_us"),
    "load from DRAM, worker's calls, us a block": (DRAM, "worker_us"),
    "processor, compute and store, s a GB": (COLD, "processor_s_per_gb"),
    "processor, load from DRAM, s a GB": (DRAM, "processor_s_per_gb"),
    "processor, load from the tier below, s a GB": (DISK, "processor_s_per_gb"),
}
OTHER_ROWS: Final = {
    "processor at rest, % of a core": "rest_percent",
    "memory of the engine (PSS), MiB": "engine_mib",
    "memory of servers and tiers (PSS), MiB": "servers_mib",
    "memory of all (PSS), MiB": "all_mib",
    "longest first token after its server or tier was killed, ms": "killed_longest_ms",
}
FACTS: Final = {
    "server or tier killed: next prompts": KILLED,
    "the same, started again": AGAIN,
    "left in /dev/shm by the killed server or tier": "server_left",
    "left in /dev/shm by the killed engine": "engine_left",
    "processes left by the killed engine after 3 s": "engine_processes",
    "new engine after the killed one": RESTARTED,
    "the same, prompts that it was killed over": TORN,
    "new engine and server": REBOOTED,
    "files damaged, new engine and server": DAMAGED,
    "left in /dev/shm at the end": "end_left",
}

SideRun = dict[str, Any]  #: phases by name, other figures, and facts in words


def measure(asked: argparse.Namespace, report: Report) -> None:
    """Run all engines, run by run. Raises ``Misuse`` without LMCache."""
    try:
        report["lmcache_version"] = version(LMCACHE)
    except PackageNotFoundError:
        raise Misuse(
            "LMCache is not installed. Run `make .venv/lmcache/.made` and set "
            "PYTHONPATH=.venv/lmcache, or pip install lmcache."
        ) from None
    if LOADED_TOKENS % asked.block_tokens or asked.block_tokens % BLOCK_TOKENS:
        raise Misuse(
            f"--block-tokens {asked.block_tokens} must divide {LOADED_TOKENS} and be a multiple "
            f"of {BLOCK_TOKENS}, the engine's own block size: give 32, 64, 128, 256, 512 or 1024."
        )
    # The seed goes into the names of blocks, of the server's as of the engines'.
    os.environ.update(PYTHONHASHSEED="0", LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR")
    turns = orders(SIDES)
    runs: list[dict[str, SideRun]] = []
    engines = 4 if asked.tier == DISK_TIER else 3
    with own_folder(asked.path) as folder, progress("engines", asked.runs * 2 * engines) as shown:
        for number in range(asked.runs):
            found: dict[str, SideRun] = {}
            for name in next(turns):
                place = folder / f"{name}-{number}"
                found[name] = _run_side(name, folder, place, asked, shown.advance)
            runs.append(check(found))
            report |= {"rows": rows(runs), "facts": facts(found), "runs": runs}


def _run_side(
    name: str, folder: Path, place: Path, asked: argparse.Namespace, advance: Callable[[], None]
) -> SideRun:
    """Take one side through all its engines."""
    place.mkdir()
    found: SideRun = {}
    with ExitStack() as stack:
        storage = stack.enter_context(Storage.open(asked.tier, place))
        side = stack.enter_context(open_side(name, storage, asked))
        start = partial(_start, folder, side, asked, found)
        with start("first") as engine:
            engine.phase(COLD, "gpu")
            engine.phase(DRAM, "gpu")
            found |= engine.at_rest()
            found |= engine.kill()
        advance()
        with start("second") as engine:
            engine.phase(RESTARTED, "gpu")
            engine.phase(TORN, "gpu", kind=NEW)
            engine.phase(DISK, "dram")
            found["server_left"] = side.kill_server()
            lives = engine.phase_without_server()
            side.start_server()
            if lives:
                time.sleep(RECOVERY_S)
                engine.phase(AGAIN, "dram")
                engine.end()
        advance()
        side.restart_server()
        with start("third") as engine:
            engine.phase(REBOOTED, "gpu")
            engine.end()
        advance()
        if asked.tier == DISK_TIER:
            side.end_server()
            damage(storage.folder)
            side.start_server()
            with start("fourth") as engine:
                engine.phase(DAMAGED, "gpu")
                engine.end()
            advance()
        side.end_server()
        found["end_left"] = left_in_shared_memory(side.marks)
    return found


@contextmanager
def _start(
    folder: Path, side: Side, asked: argparse.Namespace, found: SideRun, name: str
) -> Iterator[SideEngine]:
    """Start an engine of a side; its first request pays for its own warm-up."""
    sizes = {
        "num_gpu_blocks_override": ENGINE_BLOCKS,
        "max_model_len": STEP_TOKENS_MAX,
        "max_num_batched_tokens": STEP_TOKENS_MAX,
    }
    measures = {"idle_s": IDLE_S, "times_connector": True}
    # What an engine before it has left in the page cache would be no load from the disk.
    os.sync()
    drop_from_page_cache(side.storage.folder)
    with start_engine(
        folder, {"shape": DEMO_SHAPE, "sizes": sizes, **measures, **side.job}
    ) as part:
        engine = SideEngine(part, side, asked, found)
        part.ask(prompts=[[(f"warm-up {name}", LOADED_TOKENS + 1)]], output_tokens=OUTPUT_TOKENS)
        yield engine


class SideEngine:
    """One engine of a side; figures go to its run's."""

    def __init__(self, part: Part, side: Side, asked: argparse.Namespace, found: SideRun) -> None:
        self._part, self._side, self._found = part, side, found
        self._prompts = asked.prompts
        self._blocks = asked.prompts * LOADED_TOKENS // asked.block_tokens

    def phase(self, name: str, forget: str, kind: str = KNOWN) -> None:
        """Serve all prompts, one after the other, after the engine has forgotten them."""
        if name == DISK:
            os.sync()
            drop_from_page_cache(self._side.storage.folder)
        before_s = processor_s()
        served = self._part.ask(
            prompts=_prompts(kind, self._prompts),
            output_tokens=OUTPUT_TOKENS,
            forget=forget,
            one_by_one=True,
        )
        self._side.storage.settle()
        spent_s = processor_s() - before_s
        calls_us = served["calls_us"]
        gigabytes = self._prompts * LOADED_TOKENS * BLOCK_BYTES / BLOCK_TOKENS / 1e9
        self._found[name] = {
            **served,
            "first_token_ms": 1e3 * statistics.median(served["first_token_s"]),
            "processor_s_per_gb": spent_s / gigabytes,
            **{
                figure: sum(calls_us.get(call, 0.0) for call in calls) / self._blocks
                for figure, calls in (
                    ("lookup_us", LOOKUP_CALLS),
                    ("scheduler_us", SCHEDULER_CALLS),
                    ("worker_us", WORKER_CALLS),
                )
            },
        }

    def phase_without_server(self) -> bool:
        """Do a phase that an engine may not survive; return whether it has."""
        limit = threading.Timer(KILLED_S_MAX, self._part.process.kill)
        limit.start()
        try:
            self.phase(KILLED, "gpu")
        except ChildFailed as failed:
            causes = re.findall(r"\w+Error: .*", str(failed)) or ["no answer"]
            self._found |= {KILLED: f"the engine failed: {causes[-1]}", AGAIN: "the engine failed"}
            self._found["killed_longest_ms"] = 1e3 * KILLED_S_MAX
            return False
        finally:
            limit.cancel()
        self._found["killed_longest_ms"] = 1e3 * max(self._found[KILLED]["first_token_s"])
        return True

    def at_rest(self) -> SideRun:
        """Return what all processes take while nothing is asked of them."""
        before_s = processor_s()
        time.sleep(REST_S)
        spent_s = processor_s() - before_s
        memory = {pid: memory_mib(pid) for pid in processes()}
        engine = memory.pop(self._part.process.pid)
        servers = sum(memory.values())
        return {
            "rest_percent": 100 * spent_s / REST_S,
            "engine_mib": engine,
            "servers_mib": servers,
            "all_mib": engine + servers,
        }

    def kill(self) -> SideRun:
        """Kill the engine's process, and no other, while it stores new prompts' blocks."""
        order = {"prompts": _prompts(NEW, self._prompts), "output_tokens": OUTPUT_TOKENS}
        process = self._part.process
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        time.sleep(KILL_AFTER_S)
        process.kill()
        process.wait()
        time.sleep(REST_S)
        left = [pid for pid, _, session in living() if session == process.pid]
        return {
            "engine_left": left_in_shared_memory(self._side.engine_marks),
            "engine_processes": str(len(left)),
        }

    def end(self) -> None:
        """Let it end."""
        self._part.ask()


def _prompts(kind: str, count: int) -> list[list[tuple[str, int]]]:
    return [[(f"{kind} {number}", LOADED_TOKENS + 1)] for number in range(count)]


def check(found: dict[str, SideRun]) -> dict[str, SideRun]:
    """Raise ``InternalError`` for figures of engines that did not do the same."""
    expected = found[KVTIER][COLD]["tokens"]
    for side, run in found.items():
        for name in MEASURED:
            if run[name]["tokens"] != expected:
                raise InternalError(f"{side}, {name}: output tokens differ from kvtier's, cold")
    return found


def rows(runs: Sequence[Mapping[str, SideRun]]) -> list[dict[str, Any]]:
    """Return all figures: medians of each side, and kvtier's over LMCache's."""
    values = {
        title: {side: [run[side][phase][figure] for run in runs] for side in SIDES}
        for title, (phase, figure) in PHASE_ROWS.items()
    }
    values |= {
        title: {side: [run[side][figure] for run in runs] for side in SIDES}
        for title, figure in OTHER_ROWS.items()
    }
    return [
        {"name": title, **medians(each), **_ratio(each[KVTIER], each[LMCACHE])}
        for title, each in values.items()
    ]


def _ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Return no ratio to what took no time."""
    return ratio(over, under) if all(under) else {"ratio": None, "of_runs": []}


def facts(found: Mapping[str, SideRun]) -> list[dict[str, str]]:
    """Return in words what one run's kills left."""
    return [
        {"name": title, **{side: _in_words(found, side, key) for side in SIDES}}
        for title, key in FACTS.items()
    ]


def _in_words(found: Mapping[str, SideRun], side: str, key: str) -> str:
    fact = found[side].get(key, "")
    if isinstance(fact, str):
        return fact
    # No engine has computed those that were killed; the sides have nothing in common but the model.
    expected = found[KVTIER][TORN if key == TORN else COLD]["tokens"]
    right = sum(one == other for one, other in zip(fact["tokens"], expected, strict=True))
    share = fact["cached_tokens"] / (len(expected) * LOADED_TOKENS)
    return f"{right} of {len(expected)} right, {share:.0%} loaded"


def show(report: Report) -> None:
    """Print the tables."""
    if "rows" not in report:
        return
    options = report["options"]
    table(
        f"real engine, {options['prompts']} prompts of {LOADED_TOKENS + 1} tokens, blocks of "
        f"{options['block_tokens']}, {len(report['runs'])} runs; below DRAM: {options['tier']}",
        ["", f"LMCache {report['lmcache_version']}", "kvtier", "kvtier / LMCache", "of runs"],
        [
            [
                row["name"],
                *(f"{row[side]:,.1f}" for side in SIDES),
                *(ratio_cells(row)[:2] if row["of_runs"] else ("", "")),
            ]
            for row in report["rows"]
        ],
    )
    table(
        "what a kill leaves, in the last run",
        ["", "LMCache", "kvtier"],
        [[fact["name"], *(fact[side] for side in SIDES)] for fact in report["facts"]],
    )
