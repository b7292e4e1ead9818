"""Changes the code a little, many times, and tells which changes no near test notices.

    make mutants SAMPLE=40 SEED=1 FILES="lookups promotions"

Each mutant is a process that is forked once the tests are collected, so it costs what its tests
cost up to the first that fails (``in_place.py``); what runs at import costs the imports as well.
``SAMPLE`` mutants of each file are drawn by ``SEED``; 0 takes them all. Which tests are near a
file says ``rooms.py``; which survivors are none says ``explained.txt``.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.mutants.in_place import (
    AT_IMPORT,
    MEMORY_BYTES_MAX,
    OPTIONS,
    exit_with,
    killed_by,
    verdicts,
    wait,
    write_to,
)
from tests.mutants.operators import Mutant, difference, mutants_of, read
from tests.mutants.rooms import ROOMS, SLOW
from tests.mutants.scores import Score, reasons_of, table
from tests.mutants.watch import Watch, what_was_told

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from tests.mutants.in_place import Verdict

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build" / "mutants"
CPU_S_MAX = 240
WALL_S_MAX = 1200
PRELOADED = ("pytest", "hypothesis.stateful", "numpy", "anyio.pytest_plugin", "msgspec")
PRELOADED_TOO = ("structlog", "xxhash", "asyncio", "pytest_timeout", "_hypothesis_pytestplugin")
PRELOADED_FOR_VLLM = ("vllm.v1.kv_offload.base", "vllm.v1.core.sched.scheduler")


class MutatedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module, whose source is another than in its file."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        self._module, self._path, self._source = module, path, source

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Answer for the module only."""
        if name != self._module:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        """Run the mutated source in its place."""
        exec(compile(self._source, self._path, "exec"), module.__dict__)


def module_of(file: str) -> str:
    """Return the name that a file is imported by."""
    return file.removeprefix("backends/").removesuffix(".py").replace("/", ".")


def test(file: str, source: str, tests: Sequence[str], log: Path) -> Verdict:
    """Run the tests on a mutant in a process of its own, which imports it as it is."""
    gc.freeze()
    told = os.memfd_create("told")
    child = os.fork()
    if not child:
        exit_with(lambda: _run_tests(file, source, tests, log, told))
    in_time = wait(child, WALL_S_MAX)
    with suppress(ProcessLookupError):  # what it has left behind
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    failed = what_was_told(told).failed
    return {"killed_by": killed_by(status, in_time=in_time), "test": " ".join(failed[:1])}


def _run_tests(file: str, source: str, tests: Sequence[str], log: Path, told: int) -> int:
    os.setpgid(0, 0)
    write_to(log)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S_MAX, CPU_S_MAX))
    if "vllm" not in file:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    sys.meta_path.insert(0, MutatedFinder(module_of(file), ROOT / file, source))
    import pytest
    from hypothesis.internal.conjecture.engine import ConjectureRunner

    # That a property fails is all that is asked.
    ConjectureRunner.shrink_interesting_examples = lambda _self: None
    return int(pytest.main([*OPTIONS, *tests], plugins=[Watch(told)]))


def compiles(source: str) -> bool:
    """Tell whether it is Python at all: an asterisk may be no multiplication."""
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def chosen(file: str, sample: int, seed: int) -> tuple[list[Mutant], int]:
    """Return the mutants to try, and how many there are."""
    every = mutants_of(read(ROOT / file))
    drawn = list(every)
    random.Random(f"{seed}:{file}").shuffle(drawn)  # a larger sample has the smaller one in it
    drawn = drawn[: sample or None]
    return sorted(drawn, key=lambda mutant: (mutant.line, mutant)), len(every)


def tests_near(file: str, *, quick: bool) -> list[str]:
    """Return what to tell pytest for mutants of a file. ``quick``: without the slow tests."""
    if not quick:
        return list(ROOMS[file])
    tests = [test for test in ROOMS[file] if not test.startswith(SLOW)]
    return [*tests, *(f"--deselect={test}" for test in SLOW if test.partition("::")[0] in tests)]


def run_file(file: str, sample: int, seed: int, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Try the mutants of one file; those that an earlier run has found are not tried again."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    results = OUTPUT / f"{module_of(file)}.jsonl"
    original = read(ROOT / file)
    known = found_before(file, results)
    waiting: dict[Mutant, tuple[str, str]] = {}
    for mutant in chosen(file, sample, seed)[0]:
        source = mutant.source(original)
        if not compiles(source):
            continue
        changed = " ".join(difference(original, source))
        if (mutant, changed) in known:
            yield known[mutant, changed]
        else:
            waiting[mutant] = source, changed
    tests = tests_near(file, quick=quick)
    log = OUTPUT / f"{module_of(file)}.log"
    sources = [source for source, _ in waiting.values()]
    tried = verdicts(module_of(file), original, sources, tests, log) if sources else ()
    for (mutant, (source, changed)), verdict in zip(waiting.items(), tried, strict=True):
        is_tried = verdict["killed_by"] != AT_IMPORT
        result = {
            "mutant": mutant,
            "changed": changed,
            **(verdict if is_tried else test(file, source, tests, log)),
        }
        with results.open("a", encoding="utf-8") as out:
            out.write(json.dumps(result) + "\n")
        yield result


def found_before(file: str, results: Path) -> dict[tuple[Mutant, str], dict[str, Any]]:
    """Return what earlier runs have found. Survivors are tried again, unless they are explained."""
    every = map(json.loads, read(results).splitlines()) if results.exists() else ()
    found = {(Mutant(*each["mutant"]), each["changed"]): each for each in every}
    reasons = reasons_of(file)
    return {
        (mutant, changed): each
        for (mutant, changed), each in found.items()
        if each["killed_by"] != "survived" or changed in reasons
    }


def preload(*, with_vllm: bool) -> None:
    """Import what is big and is not ours, so that forked processes need not."""
    names = (*PRELOADED, *PRELOADED_TOO, *(PRELOADED_FOR_VLLM if with_vllm else ()))
    for name in names:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.split(".")[0] in ("kvtier", "kvtier_backends")]
    assert not ours, f"imported before it was mutated: {ours}"


def main() -> None:
    """Run all files, or those whose names are given."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run")
    parser.add_argument("files", nargs="*", help="parts of the names of files; none: all")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each file; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="without the slow tests")
    given = parser.parse_args()
    files = [file for file in ROOMS if not given.files or any(part in file for part in given.files)]
    os.chdir(ROOT)
    preload(with_vllm=any("vllm" in file for file in files))
    scores = []
    for file in files:
        _, there = chosen(file, given.sample, given.seed)
        score = Score.of(file, list(run_file(file, given.sample, given.seed, quick=given.quick)))
        print(score.said(there), flush=True)  # each file as it is done
        scores.append(score)
    print(table(scores))
    sys.exit(Score.of_all(scores).percent < 90)


if __name__ == "__main__":
    main()
