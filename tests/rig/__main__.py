"""Plays scenarios: ``python -m tests.rig --seed N``, or ``--seconds S`` of fresh ones.

With ``--device cuda`` it first has to find planted mistakes on the device. Where there is
none it says so, and ends with status 77.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tests.support.cuda import NO_DEVICE, vllm_on_cuda, why_no_cuda


def main() -> int:
    """Play what the command line says, and end with the first that fails."""
    asked = _arguments()
    if "PYTHONHASHSEED" not in os.environ:  # sets of strings have an order of each process's own
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONHASHSEED": "0"})
    imports: AbstractContextManager[None] = nullcontext()
    if asked.device == "cuda":
        missing = why_no_cuda(compiled=False)
        if missing is not None:
            print(f"the rig needs a CUDA device: {missing} Nothing was checked.")
            return NO_DEVICE
        imports = vllm_on_cuda()
    elif asked.device == "pretended":
        from tests.rig.pretended_cuda import vllm_on_pretended_cuda

        imports = vllm_on_pretended_cuda()
    with imports:
        import structlog

        import tests.rig.quiet_vllm  # noqa: F401 - imported for what it does
        from tests.rig.scenario import play

    structlog.configure(processors=[], logger_factory=structlog.ReturnLoggerFactory())
    if asked.seed is not None:
        print(play(asked.seed))
        return 0
    if asked.device != "cpu":
        _find_planted()
    _play_many(play, asked)
    if asked.device == "cuda":
        _say_what_it_was()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.rig", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--count", type=int, help="play so many, from --first on")
    parser.add_argument("--first", type=int, default=None, help="seed of the first")
    parser.add_argument("--seconds", type=float, default=60.0, help="play fresh ones for so long")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda", "pretended"],
        default="cpu",
        help="where the KV tensors are; pretended: the code for CUDA, in host memory",
    )
    return parser.parse_args()


def _play_many(play: Any, asked: argparse.Namespace) -> None:
    first = random.SystemRandom().randrange(1 << 40) if asked.first is None else asked.first
    ends_s = time.monotonic() + asked.seconds
    print(f"seeds from {first} on", flush=True)
    played = tokens = steps = loads = 0
    began_s, cpu_began_s = time.monotonic(), time.process_time()
    while played < asked.count if asked.count else time.monotonic() < ends_s:
        told = play(first + played)
        played += 1
        tokens += told.tokens_checked
        steps += told.steps
        loads += told.loads
    seconds, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_began_s
    print(
        f"{played} scenarios in {seconds:.0f} s, {cpu_s:.0f} s of CPU: {steps} steps, "
        f"{tokens} tokens checked, {loads} loads"
    )


def _find_planted() -> None:
    """Plant each mistake that a device's worker could make, until it is found."""
    from tests.rig.planted_cuda import MISTAKES, scenarios_until_found

    for name, plant in MISTAKES.items():
        print(f"{name}: found in scenario {scenarios_until_found(plant)}", flush=True)


def _say_what_it_was() -> None:
    import torch
    import vllm

    from tests.rig.cuda_device import CudaDevice

    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, vLLM {vllm.__version__}; "
        f"of {CudaDevice.engines} ranks, {CudaDevice.engines_pinned} pinned their memory, and "
        f"{CudaDevice.engines_with_kernel} had vLLM's Triton kernel for loads"
    )


if __name__ == "__main__":
    sys.exit(main())
