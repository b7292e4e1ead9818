"""A tier of vLLM's that kvtier hosts hangs for a minute in each of its methods, in turn.

    python -m tests.vllm.hosted_hangs                  # a quarter of an hour
    python -m tests.vllm.hosted_hangs --seconds 10 --methods lookup,submit_load

It times what the scheduler's thread waits: each call of the manager, and each request that looks up
blocks which the tier has, or which nobody has. ``none``, without a hang, comes first: what it shows
is the machine's, which delays calls as well. The exit status is 1 if a call took more than 5 ms of
the scheduler's processor time, or a request more than its two deadlines and ``SLACK_S``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any, Final

from vllm.utils.gc_utils import freeze_gc_heap

from tests.vllm.support.scripted_tier import METHODS, ScriptedTier
from tests.vllm.test_hosted_tiers import engine, scripted

DEADLINE_S: Final = 0.5
"""Of a lookup, of a load and of a store, each."""

SLACK_S: Final = 0.5
CALL_S_MAX: Final = 0.005
AT_THE_END: Final = ("drain_jobs", "shutdown")
"""What is called when the tier is closed: no request is under way then."""

NOT_TIMED: Final = ("facade", "_memory", "_tiers")


class Timed:
    """A manager whose calls are timed: by the clock, and by the processor time of the thread.

    It keeps no call, so that Python's collector has no more to look through than in an engine.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.begin()

    def begin(self) -> None:
        """Forget the calls before."""
        self.calls = self.late = 0
        self.most_cpu_s = 0.0
        self.slowest: tuple[float, str] = (0.0, "")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._manager, name)
        if name in NOT_TIMED or not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            began_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return found(*arguments)
            finally:
                spent_s = time.perf_counter() - began_s
                self.most_cpu_s = max(self.most_cpu_s, time.thread_time() - cpu_s)
                self.calls += 1
                self.late += spent_s > CALL_S_MAX
                if spent_s > self.slowest[0]:
                    self.slowest = spent_s, name

        return call


def play(method: str, hang_s: float) -> bool:
    """Have the tier hang in this method; say what waited for it. True if nothing did too long."""
    deadlines = dict.fromkeys(
        ("probe_timeout_s", "promote_timeout_s", "store_timeout_s"), DEADLINE_S
    )
    with engine(scripted(deadlines), close_timeout_s=1.0) as played:
        timed = played.manager = Timed(played.manager)
        played.store([1, 2])
        played.evict()
        tier = ScriptedTier.last
        tier.hangs_in = method
        freeze_gc_heap()  # as vLLM's engine does once it has started
        timed.begin()
        waits_s = [0.0]
        number, until_s = 3, time.monotonic() + (0.0 if method in AT_THE_END else hang_s)
        while time.monotonic() < until_s:
            for wanted in ([1, 2], [5000 + number]):
                began_s = time.perf_counter()
                played.read(wanted)
                waits_s.append(time.perf_counter() - began_s)
            played.store([number])
            assert played.read([number]) == [number]
            number += 1
        if method not in AT_THE_END:
            tier.hangs_in = ""
            tier.goes_on.set()
        played.step()
        closing_s = time.monotonic()
    closing_s = time.monotonic() - closing_s
    slowest_s, slowest = timed.slowest
    hung = tier.hangs.is_set()
    print(
        f"{method:20} {'hung' if hung else 'no hang':8} {timed.calls:6} calls, "
        f"{timed.late} over 5 ms; slowest {1e3 * slowest_s:.1f} ms ({slowest}), most processor "
        f"time {1e3 * timed.most_cpu_s:.1f} ms; slowest of {len(waits_s) - 1} requests "
        f"{max(waits_s):.2f} s; closed in {closing_s:.1f} s",
        flush=True,
    )
    is_patient = max(waits_s) <= 2 * DEADLINE_S + SLACK_S
    return timed.most_cpu_s <= CALL_S_MAX and is_patient and hung == (method != "none")


def main() -> int:
    """Play each method in a process of its own: one that hangs at the end is left behind there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each hangs")
    parser.add_argument("--methods", default=",".join(("none", *METHODS)))
    parser.add_argument("--play", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        return 0 if play(given.play, given.seconds) else 1
    failed = [
        method
        for method in given.methods.split(",")
        if subprocess.run(
            [
                *(sys.executable, "-W", "ignore", "-m", __spec__.name),
                *("--play", method, "--seconds", str(given.seconds)),
            ],
            check=False,
        ).returncode
    ]
    if failed:
        print("too slow, or never called:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
