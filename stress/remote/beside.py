"""A helper of a soak in a process of its own, so that its threads and files are not the soak's.

It prints its port, then answers each line that it is told with an empty one.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvtier.tools.process_group import process_group
from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Beside:
    """A module that ``answer`` runs in. One thread."""

    def __init__(self, module: str, log: Path, *words: str) -> None:
        """Start it with these arguments. ``log``: for what it says on its standard error."""
        self._module = module
        self._stack = ExitStack()
        with log.open("ab") as file:
            self._process = self._stack.enter_context(
                process_group(
                    [sys.executable, "-m", module, *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                )
            )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            self._stack.callback(pipe.close)
        self.port = int(self._heard())

    def tell(self, *words: object) -> None:
        """Tell it something, and wait until it has done so. Raises ``Failure``."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self._process.stdin.flush()
        self._heard()

    def end(self) -> None:
        """Kill it."""
        self._stack.close()

    def _heard(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failure(f"a helper has ended: {self._module}")
        return line.decode().strip()


def answer(port: int, told: Callable[[list[str]], object]) -> None:
    """Do what a helper does, until its standard input ends."""
    print(port, flush=True)
    for line in sys.stdin:
        told(line.split())
        print(flush=True)
