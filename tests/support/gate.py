"""``make test``: its parts, three at a time, how far they are, and what was left out in the end.

A part is a target of the Makefile. What it prints is shown at its end, in one piece. After a part
that fails no other is begun. Tests that were skipped, since the machine lacks what they need,
end in one table; with ``CI=true`` they have failed (``tests/conftest.py``).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from xml.etree import ElementTree as ET

from tests.support.needs import lacking

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

AT_ONCE: Final = 3
"""On two cores: most of a part is one thread, and waits for servers, starts and what hangs for a
quarter of its time. Two at a time left a quarter of both cores idle, three leave little."""

PRIOR_S: Final = 120.0  #: how much the expected times count beside those of this run
RESULTS: Final = Path("build/durations")  #: a JUnit file for each part


class Part(NamedTuple):
    """One target."""

    name: str
    seconds: float  #: about how long it takes, beside two others on two cores
    after: str = ""  #: the part that must have ended before
    need: str = ""  #: what it cannot do without, of ``needs.NEEDS``


# The longest first, so that none runs alone at the end. vLLM 0.33 is laid out meanwhile.
PARTS: Final = (
    Part("vllm-0.33", 45),
    Part("lint", 3),
    Part("types", 20),
    Part("unit", 220),
    Part("engine-0.32", 180),
    Part("backends", 155),
    Part("engine-0.33", 130, after="vllm-0.33"),
    Part("conformance", 125),
    Part("model", 85),
    Part("rig-0.32", 85),
    Part("rig-0.33", 55, after="vllm-0.33"),
    Part("soak-filesystem", 30, need="fuse"),
    Part("soak", 25),
    Part("soak-remote", 10),
    Part("package", 20),
    Part("docs", 8),
)


class Ended(NamedTuple):
    """A part that ran."""

    status: int
    seconds: float
    output: str


def run(part: Part) -> Ended:
    """Run one target, without a standard input."""
    began_s = time.monotonic()
    done = subprocess.run(
        ["make", "--no-print-directory", part.name, "WORKERS=0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return Ended(done.returncode, time.monotonic() - began_s, done.stdout)


def left_out(parts: Iterable[Part]) -> dict[str, Counter[str]]:
    """Return why tests were skipped, and how many of which file."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for part in parts:
        path = RESULTS / f"{part.name}.xml"
        for case in ET.parse(path).iter("testcase") if path.exists() else ():
            skipped = case.find("skipped")
            if skipped is not None and skipped.get("type") != "pytest.xfail":
                test = case.get("classname", "").replace(".", "/") + ".py"
                found[skipped.get("message", "")][test] += 1
    return found


def table(found: Mapping[str, Counter[str]]) -> str:
    """Return what was left out, why, and what to do, for a person."""
    lines = ["== left out: this machine lacks what these tests need"]
    for why, tests in sorted(found.items()):
        what, _, remedy = why.partition(": ")
        lines.append(f"{tests.total()} tests, {what}. To run them: {remedy}")
        lines += [f"{count:6} {test}" for test, count in sorted(tests.items())]
    return "\n".join(lines)


class Run:
    """One run of all parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._waiting = list(parts)
        self._running: dict[Future[Ended], tuple[Part, float]] = {}
        self._ended: dict[Part, float] = {}
        self._total = len(parts)
        self._failed = False

    def play(self) -> bool:
        """Run them. Returns whether all passed."""
        print(f"== {self._total} parts, about {for_a_person(self._left_s())}", flush=True)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            while self._running or (self._waiting and not self._failed):
                for part in () if self._failed else self._next():
                    self._waiting.remove(part)
                    print(f"== {part.name} begins", flush=True)
                    self._running[threads.submit(run, part)] = part, time.monotonic()
                for future in wait(self._running, return_when=FIRST_COMPLETED).done:
                    part, _ = self._running.pop(future)
                    self._note(part, future.result())
        return not self._failed

    def _next(self) -> list[Part]:
        names = {part.name for part in self._ended}
        ready = [part for part in self._waiting if not part.after or part.after in names]
        return ready[: AT_ONCE - len(self._running)]

    def _note(self, part: Part, result: Ended) -> None:
        self._failed = self._failed or bool(result.status)
        self._ended[part] = result.seconds
        print(result.output, end="")
        print(
            f"== {part.name} {'FAILED' if result.status else 'passed'} in {result.seconds:.0f} s"
            f" ({len(self._ended)} of {self._total} parts,"
            f" about {for_a_person(self._left_s())} left)",
            flush=True,
        )

    def _left_s(self) -> float:
        """Return about how long the rest takes, by how long the parts took that ended."""
        expected_s = PRIOR_S + sum(part.seconds for part in self._ended)
        pace = (PRIOR_S + sum(self._ended.values())) / expected_s
        now_s = time.monotonic()
        rest = [
            max(0.0, part.seconds * pace - (now_s - since_s))
            for part, since_s in self._running.values()
        ]
        rest += [part.seconds * pace for part in self._waiting]
        return max(sum(rest) / AT_ONCE, max(rest, default=0.0))


def main() -> int:
    """Run all parts. Returns 1 if one fails."""
    missing = {part: lacking(part.need) for part in PARTS if part.need and lacking(part.need)}
    if os.environ.get("KVTIER_TEST_LEAVE_OUT") != "1":
        missing = {}  # it fails, and says why
    parts = [part for part in PARTS if part not in missing]
    for part in PARTS:
        (RESULTS / f"{part.name}.xml").unlink(missing_ok=True)
    passed = Run(parts).play()
    found = left_out(parts)
    for part, why in missing.items():
        found[why][f"make {part.name}"] += 1
    if found:
        print(table(found))
    return int(not passed)


def for_a_person(seconds: float) -> str:
    """Return a time in words."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


if __name__ == "__main__":
    sys.exit(main())
