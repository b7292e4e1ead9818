"""Changes the code a little, many times, and tells which changes no near test notices.

    make mutants SAMPLE=40 SEED=1 FILES="lookups promotions"

Each mutant is a process that is forked once the heavy imports are made, so it costs what its
tests cost. ``SAMPLE`` mutants of each file are drawn by ``SEED``; 0 takes them all. Which tests
are near a file says ``rooms.py``; which survivors are none says ``explained.txt``.
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
import select
import signal
import sys
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.mutants.operators import Mutant, difference, mutants_of, read
from tests.mutants.rooms import ROOMS, SLOW

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build" / "mutants"
EXPLAINED = Path(__file__).with_name("explained.txt")
CPU_S_MAX = 240
WALL_S_MAX = 1200
MEMORY_BYTES_MAX = 6 << 30
PYTEST_OPTIONS = ("-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-seed=1")
PYTEST_OPTIONS += ("-W", "ignore::pytest.PytestAssertRewriteWarning")
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


def test(file: str, source: str, tests: Sequence[str], log: Path) -> str:
    """Run the tests on a mutant in a process of its own. Returns what killed it, or "survived"."""
    gc.freeze()
    child = os.fork()
    if not child:
        _run_tests(file, source, tests, log)
    ended = os.pidfd_open(child)
    in_time, _, _ = select.select([ended], [], [], WALL_S_MAX)
    os.close(ended)
    with suppress(ProcessLookupError):  # what it has left behind
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not in_time:
        return "no end"
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "survived"
    return {1: "tests", 2: "import"}.get(code, f"exit {code}")


def _run_tests(file: str, source: str, tests: Sequence[str], log: Path) -> None:
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S_MAX, CPU_S_MAX))
    if "vllm" not in file:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    sys.meta_path.insert(0, MutatedFinder(module_of(file), ROOT / file, source))
    code = 3
    try:
        import pytest
        from hypothesis.internal.conjecture.engine import ConjectureRunner

        # That a property fails is all that is asked.
        ConjectureRunner.shrink_interesting_examples = lambda _self: None
        code = int(pytest.main([*PYTEST_OPTIONS, *tests]))
    except BaseException:  # noqa: BLE001 - it must not go on as the driver
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def compiles(source: str) -> bool:
    """Tell whether it is Python at all: an asterisk may be no multiplication."""
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def check_that_tests_pass(files: Sequence[str], *, quick: bool) -> None:
    """Run the tests of each room without a change: else they would kill every mutant."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    log = OUTPUT / "without_a_change.log"
    for room in {ROOMS[file] for file in files}:
        file = next(each for each in files if ROOMS[each] == room)
        tests = tests_near(file, quick=quick)
        killed_by = test(file, read(ROOT / file), tests, log)
        if killed_by != "survived":
            sys.exit(f"{file}: its tests fail without a change ({killed_by})\n{read(log)}")


def explained() -> dict[tuple[str, str], str]:
    """Return the reason of each survivor that is none, by file and difference."""
    found = {}
    for line in read(EXPLAINED).splitlines():
        if line and not line.startswith("#"):
            file, changed, reason = line.split(" | ")
            found[file, changed] = reason
    return found


def chosen(file: str, sample: int, seed: int) -> tuple[list[Mutant], int]:
    """Return the mutants to try, and how many there are."""
    every = mutants_of(read(ROOT / file))
    drawn = list(every)
    random.Random(f"{seed}:{file}").shuffle(drawn)  # a larger sample has the smaller one in it
    drawn = drawn[: sample or None]
    return sorted(drawn, key=lambda mutant: (mutant.line, mutant)), len(every)


def tests_near(file: str, *, quick: bool) -> list[str]:
    """Return the tests to run on mutants of a file. ``quick``: without the slow ones."""
    return [test for test in ROOMS[file] if not (quick and test.startswith(SLOW))]


def run_file(file: str, sample: int, seed: int, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Try the mutants of one file; those that an earlier run has tried are not tried again."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    results = OUTPUT / f"{module_of(file)}.jsonl"
    original = read(ROOT / file)
    tests = tests_near(file, quick=quick)
    known = {}
    if results.exists():
        known = {
            tuple(each["mutant"]): each for each in map(json.loads, read(results).splitlines())
        }
    log = OUTPUT / f"{module_of(file)}.log"
    mutants, _ = chosen(file, sample, seed)
    for mutant in mutants:
        result = known.get((mutant.operator, mutant.occurrence, mutant.line))
        source = mutant.source(original)
        if not compiles(source):
            continue
        changed = " ".join(difference(original, source))
        if result is None or result["changed"] != changed or result["killed_by"] == "survived":
            killed_by = test(file, source, tests, log)
            result = {"mutant": mutant, "changed": changed, "killed_by": killed_by}
            with results.open("a", encoding="utf-8") as out:
                out.write(json.dumps(result) + "\n")
        yield result


def preload(*, with_vllm: bool) -> None:
    """Import what is big and is not ours, so that forked processes need not."""
    names = (*PRELOADED, *PRELOADED_TOO, *(PRELOADED_FOR_VLLM if with_vllm else ()))
    for name in names:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.split(".")[0] in ("kvtier", "kvtier_backends")]
    assert not ours, f"imported before it was mutated: {ours}"


def report(file: str, tried: list[dict[str, Any]], there: int) -> tuple[int, int, int]:
    """Print the score of a file and its survivors. Returns killed, explained and tried."""
    reasons = explained()
    survivors = [each for each in tried if each["killed_by"] == "survived"]
    open_ones = [each for each in survivors if (file, each["changed"]) not in reasons]
    killed = len(tried) - len(survivors)
    kinds = dict(Counter(each["killed_by"] for each in tried))
    print(  # each file as it is done
        f"{file}: {killed} of {len(tried)} killed (of {there} there are), "
        f"{len(survivors) - len(open_ones)} explained, {len(open_ones)} not; {kinds}",
        flush=True,
    )
    for each in open_ones:
        print(f"    line {each['mutant'][2]}, {each['mutant'][0]}: {each['changed']}")
    return killed, len(survivors) - len(open_ones), len(tried)


def main() -> None:
    """Run all files, or those whose names are given."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run")
    parser.add_argument("files", nargs="*", help="parts of the names of files; none: all")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each file; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="without the slow tests")
    parser.add_argument("--unchecked", action="store_true", help="take it that the tests pass")
    given = parser.parse_args()
    files = [file for file in ROOMS if not given.files or any(part in file for part in given.files)]
    os.chdir(ROOT)
    preload(with_vllm=any("vllm" in file for file in files))
    if not given.unchecked:
        check_that_tests_pass(files, quick=given.quick)
    killed = reasons = tried = 0
    for file in files:
        _, there = chosen(file, given.sample, given.seed)
        results = list(run_file(file, given.sample, given.seed, quick=given.quick))
        scores = report(file, results, there)
        killed, reasons, tried = (
            a + b for a, b in zip((killed, reasons, tried), scores, strict=True)
        )
    score = 100 * killed / max(1, tried - reasons)
    print(f"seed {given.seed}: {killed} of {tried} killed, {reasons} explained")
    print(f"score, without those explained: {score:.1f} %")
    sys.exit(score < 90)


if __name__ == "__main__":
    main()
