"""``kvtier ls``, ``fsck``, ``purge`` and ``check`` beside a server, on the folder it uses."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from stress.engine.watch import DISK
from stress.failure import Failure
from stress.limits import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stress.engine.faults import UnderWay
    from stress.plan import Fault

TOUCHED_WITHIN_S: Final = 30.0
"""So long after a fault of the tier its folder may still be away, or its process be starting. In
the gate there is no saying how long."""

REFUSED: Final = 2
IN_USE: Final = "is in use by"


@dataclass(frozen=True)
class Call:
    """How a tool is called, and which statuses the command line's page names for it."""

    arguments: tuple[str, ...]
    usually: frozenset[int]  #: while nothing else is done to the tier
    at_worst: frozenset[int]  #: while the tier's folder or process is harmed


CALLS: Final = {
    "ls": Call(("ls",), frozenset({0}), frozenset({0, 2})),
    "fsck": Call(("fsck",), frozenset({0, 1}), frozenset({0, 1, 2})),
    "repair": Call(("fsck", "--repair"), frozenset({2}), frozenset({0, 1, 2})),
    # 1: a region was read for long, or the engine was busy for long; then it stays as it is.
    "purge": Call(("purge", "--all", "--yes"), frozenset({0, 1}), frozenset({0, 1, 2})),
    "purge_old": Call(("purge", "--older-than", "20s"), frozenset({0, 1}), frozenset({0, 1, 2})),
    "check": Call(("check",), frozenset({1}), frozenset({0, 1, 2})),
}


class Tools:
    """Runs them. Harm that they do shows elsewhere: in tokens, breakers and failed requests."""

    def __init__(
        self, folder: Path, config: Path, under_way: UnderWay, *, is_gate: bool = False
    ) -> None:
        """``folder``: the disk tier's; ``config``: a file with the server's configuration."""
        self._within_s = float("inf") if is_gate else TOUCHED_WITHIN_S
        self._folder = folder
        self._config = config
        self._under_way = under_way

    async def do(self, fault: Fault) -> int:
        """Run one. Raises ``Failure`` for a status that is not documented for the moment."""
        call = CALLS[fault.target]
        place = self._config if fault.target == "check" else self._folder
        was_touched = self._was_touched()
        status, text = await run_kvtier([*call.arguments, str(place)])
        if was_touched or self._was_touched():
            allowed = call.at_worst
        elif fault.target == "fsck" and not self._under_way.touched(DISK):
            allowed = frozenset({0})  # nothing has harmed the folder, and neither may a server
        else:
            allowed = call.usually
        said = f"kvtier {' '.join(call.arguments)}"
        if status not in allowed or "Traceback" in text:
            raise Failure(f"{said} ended with status {status}, not {sorted(allowed)}: {text}")
        if allowed == {REFUSED} and IN_USE not in text:
            raise Failure(f"{said} was refused without {IN_USE!r}: {text}")
        return 1

    def _was_touched(self) -> bool:
        return self._under_way.touched(DISK, within_s=self._within_s)


async def blocks_listed(folder: Path) -> int:
    """Return how many blocks ``kvtier ls`` sees in a folder. Raises ``Failure``."""
    status, text = await run_kvtier(["ls", "--json", "-", str(folder)])
    if status != 0:
        raise Failure(f"kvtier ls ended with status {status}: {text}")
    figures: dict[str, Any] = json.loads(text)
    return int(figures["blocks"])


async def run_kvtier(arguments: Sequence[str]) -> tuple[int, str]:
    """Run the command; returns its status and all that it printed. Raises ``Failure``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvtier",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TERM": "dumb"},
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            printed, _ = await process.communicate()
    except TimeoutError:
        raise Failure(f"kvtier {' '.join(arguments)} still runs after {PATIENCE_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None, "it has ended"
    return process.returncode, printed.decode(errors="replace")
