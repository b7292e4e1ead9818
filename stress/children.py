"""Parts of a soak or a benchmark in processes of their own; none outlives it.

``stress.children MODULE JOB`` is such a part: the module's ``main`` gets the job and
yields answers, each of which is a line of JSON. What it prints otherwise is log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, Final

from kvtier.errors import KVTierError
from kvtier.tools.process_group import process_group

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LOG_TAIL_LINES: Final = 30


class ChildFailed(KVTierError):
    """Raised when a part ended badly. The text ends with its log."""


class Part:
    """A part, as seen from who has started it. Calls raise ``ChildFailed``."""

    def __init__(self, module: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.process = process
        self._module = module
        self._log = log

    def ask(self, **order: Any) -> Any:  # noqa: ANN401 - JSON
        """Give an order, as a line of JSON on its stdin, and return the answer."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # there is no answer then, which says why
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:  # noqa: ANN401 - JSON
        """Return the next answer."""
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        status = self.process.wait()
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        text = "\n".join(tail)
        raise ChildFailed(f"{self._module} ended with status {status}. Its last lines:\n{text}")


@contextmanager
def start_part(module: str, job: Mapping[str, Any], **environment: str) -> Iterator[Part]:
    """Start a part. It and all that it has started are killed when the block is left."""
    with (
        tempfile.TemporaryFile() as log,
        process_group(
            [sys.executable, "-W", "ignore", "-m", __name__, module, json.dumps(dict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment},
        ) as process,
    ):
        try:
            yield Part(module, process, log)
        finally:
            for pipe in (process.stdout, process.stdin):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()


def run_child(module: str, job: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Run a part that gives a single answer, to its end. Raises ``ChildFailed``."""
    with start_part(module, job) as part:
        found = part.answer()
        part.process.wait()
        return found


def main() -> None:
    """Be such a part."""
    module, job = sys.argv[1:]
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        for answer in import_module(module).main(json.loads(job)):
            answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
