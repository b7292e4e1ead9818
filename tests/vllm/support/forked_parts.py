"""The parts of a benchmark, as forks of a process that has imported vLLM.

``stress.bench`` runs each engine in a new process, which imports vLLM for twelve seconds. In
a scenario that ``spawns`` (``tests/vllm/support/spawning.py``) a part is a new process too,
with all of it imported. How a part is started otherwise, and that none outlives the
benchmark, is what other tests look at.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stress.bench.children import QUIET_ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Mapping


def run_forked(module: str, job: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """Do what ``stress.bench.children.run_child`` does."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        part = multiprocessing.get_context("spawn").Process(
            target=_main_of, args=(module, json.dumps(dict(job)), dict(environment), str(output))
        )
        part.start()
        part.join()
        assert part.exitcode == 0, f"{module} ended with {part.exitcode}"
        return json.loads(output.read_text())


def _main_of(module: str, job: str, environment: dict[str, str], output: str) -> None:
    os.environ.update({**QUIET_ENVIRONMENT, **environment})
    (answer,) = importlib.import_module(module).main(json.loads(job))
    Path(output).write_text(json.dumps(answer))
