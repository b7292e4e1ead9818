"""Runs the engines one after the other, and judges what each round of prompts gave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.process_group import process_group
from tests.support.patience import until
from tests.vllm.gpu_engine import engines
from tests.vllm.gpu_engine.engines import ENGINES, LENGTHS, MORE_LENGTHS, restarted_engine
from tests.vllm.support.children import child_environment
from tests.vllm.support.engine import BLOCK_TOKENS
from tests.vllm.support.models import make_llama
from tests.vllm.support.play import ours_in_shm, whole_blocks

if TYPE_CHECKING:
    from pathlib import Path

LOG_TAIL_LINES = 40


class Failed(Exception):
    """Raised when an engine ends as it must not."""


@dataclass(frozen=True)
class Expected:
    """What a round must give. Its tokens are compared with those of ``reference``."""

    lengths: list[int] = field(default_factory=lambda: LENGTHS)
    reference: str = "prefix cache"
    is_cold: bool = False
    loads: bool = False  #: all whole blocks, from DRAM
    reads: bool = False  #: all whole blocks, from disk to DRAM
    is_damaged: bool = False


_MORE: Final = {"lengths": MORE_LENGTHS, "reference": "more, prefix cache"}
EXPECTED: Final = {
    "cold": Expected(is_cold=True),
    "prefix cache": Expected(),
    "DRAM": Expected(loads=True),
    "DRAM, slots changed places": Expected(loads=True, is_damaged=True),
    "DRAM, zeroed": Expected(loads=True, is_damaged=True),
    "disk": Expected(loads=True, reads=True),
    "restart": Expected(loads=True, reads=True),
    "more, cold": Expected(**_MORE, is_cold=True),
    "more, prefix cache": Expected(**_MORE),
    "kill -9": Expected(loads=True, reads=True),
    "more, kill -9": Expected(**_MORE, loads=True, reads=True),
}


def run_all(device: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Run the engines, one after the other; return each round's figures. Raises ``Failed``."""
    make_llama(folder / "model", hidden_size=256)  # heads of 64, which all attention kernels take
    told: dict[str, dict[str, Any]] = {}
    for name in ENGINES:
        told |= _run_child(name, device, folder)
    return told


def _run_child(name: str, device: str, folder: Path) -> dict[str, dict[str, Any]]:
    note, log = folder / name, folder / f"{name}.log"
    engine_id = f"kvtier-gpu-engine-{os.getpid()}"
    command = [sys.executable, "-W", "ignore", "-m", engines.__name__]
    command += [name, device, str(folder), engine_id]
    with (
        log.open("wb") as out,
        process_group(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=child_environment({}),
        ) as child,
    ):
        until(lambda: note.exists() or child.poll() is not None, lambda: f"{name}: no end")
        ends_by_itself = name != restarted_engine.__name__
        if not ends_by_itself and child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        until(lambda: child.poll() is not None, lambda: f"{name}: no end")
        status = child.returncode
    left = ours_in_shm(engine_id)
    if status != (0 if ends_by_itself else -signal.SIGKILL) or not note.exists():
        tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        raise Failed(f"{name} ended with status {status}. Its last lines:\n" + "\n".join(tail))
    if left:
        raise Failed(f"{name} left {left} in shared memory")
    rounds: dict[str, dict[str, Any]] = json.loads(note.read_text())
    return rounds


def judged(told: dict[str, dict[str, Any]], device: str) -> tuple[list[str], list[str]]:
    """Return a line for each round, and what is wrong."""
    lines, wrong = [], []
    for name, expected in EXPECTED.items():
        figures = told[name]
        same = _same_outputs(figures, told[expected.reference])
        lines.append(
            f"{name}: {same} of {len(expected.lengths)} outputs the same, "
            f"{sum(figures['cached'])} tokens not computed; {figures['loaded']:.0f} blocks from "
            f"DRAM, {figures['read']:.0f} from disk"
        )
        wrong += [f"{name}: {each}" for each in _wrong(figures, expected, same, device)]
    return lines, wrong


def _same_outputs(figures: dict[str, Any], reference: dict[str, Any]) -> int:
    pairs = zip(figures["tokens"], reference["tokens"], strict=True)
    return sum(tokens == others for tokens, others in pairs)


def _wrong(figures: dict[str, Any], expected: Expected, same: int, device: str) -> list[str]:
    """Return what is not as expected."""
    wrong = []
    asked = len(expected.lengths)
    # Cold prompts are computed in other shapes, and in half precision a near tie may turn.
    may_turn = asked // 2 if expected.is_cold and device != "cpu" else 0
    if expected.is_damaged and same > asked // 2:
        wrong.append(f"{same} outputs are as without the fault, so this shows nothing")
    if not expected.is_damaged and same < asked - may_turn:
        wrong.append(f"{asked - same} outputs differ")
    whole = whole_blocks(expected.lengths, BLOCK_TOKENS)
    if figures["cached"] != ([0] * asked if expected.is_cold else whole):
        wrong.append(f"{figures['cached']} tokens were not computed, of {expected.lengths}")
    blocks = sum(whole) // BLOCK_TOKENS
    for key, moves in (("loaded", expected.loads), ("read", expected.reads)):
        if figures[key] != moves * blocks:
            wrong.append(f"{figures[key]:.0f} blocks were {key}, {moves * blocks} expected")
    return wrong
