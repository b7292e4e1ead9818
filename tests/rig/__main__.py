"""Plays scenarios: ``python -m tests.rig --seed N``, or ``--seconds S`` of fresh ones."""

from __future__ import annotations

import argparse
import random
import time

import structlog

import tests.rig.quiet_vllm  # noqa: F401 - imported for what it does
from tests.rig.scenario import play


def main() -> None:
    """Play what the command line says, and end with the first that fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.rig", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--count", type=int, help="play so many, from --first on")
    parser.add_argument("--first", type=int, default=None, help="seed of the first")
    parser.add_argument("--seconds", type=float, default=60.0, help="play fresh ones for so long")
    asked = parser.parse_args()
    structlog.configure(processors=[], logger_factory=structlog.ReturnLoggerFactory())
    if asked.seed is not None:
        print(play(asked.seed))
        return
    first = random.SystemRandom().randrange(1 << 40) if asked.first is None else asked.first
    ends_s = time.monotonic() + asked.seconds
    print(f"seeds from {first} on", flush=True)
    played = tokens = steps = loads = 0
    began_s = time.monotonic()
    while played < asked.count if asked.count else time.monotonic() < ends_s:
        told = play(first + played)
        played += 1
        tokens += told.tokens_checked
        steps += told.steps
        loads += told.loads
    seconds = time.monotonic() - began_s
    print(
        f"{played} scenarios in {seconds:.0f} s: {steps} steps, {tokens} tokens checked, "
        f"{loads} loads"
    )


main()
