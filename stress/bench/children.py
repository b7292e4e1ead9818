"""Runs a part of a benchmark in a process of its own; none outlives the benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import KVTierError
from kvtier.tools.process_group import process_group

if TYPE_CHECKING:
    from collections.abc import Mapping

LOG_TAIL_LINES: Final = 30

QUIET_ENVIRONMENT: Final = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Keeps vLLM from filling the terminal, and from asking the network."""


def run_child(module: str, job: Mapping[str, Any], environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - JSON
    """Run ``python -m module JOB`` and return the JSON value of its last line on stdout.

    Raises ``ChildFailed`` with the end of its log. The child and all that it
    has started are killed if this call is left in any other way.
    """
    with tempfile.TemporaryFile() as log:
        part = process_group(
            [sys.executable, "-W", "ignore", "-m", module, json.dumps(dict(job))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **QUIET_ENVIRONMENT, **environment},
        )
        with part as child:
            output, _ = child.communicate()
        lines = output.decode(errors="replace").splitlines()
        if child.returncode or not lines:
            log.seek(0)
            tail = log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise ChildFailed(module, child.returncode, "\n".join([*lines[-3:], *tail]))
        return json.loads(lines[-1])


class ChildFailed(KVTierError):
    """Raised when a part of a benchmark ended badly. The text ends with its log."""

    def __init__(self, module: str, status: int, log: str) -> None:
        super().__init__(f"{module} ended with status {status}. Its last lines:\n{log}")
