"""Runs scenarios on a real vLLM engine, each in a process of its own.

vLLM keeps state in module globals and environment variables, so a scenario is
a plain function at module level that a child process calls; its JSON result is
what the test looks at. ``python -m tests.vllm.children`` is that child.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.patience import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LOG_TAIL_CHARACTERS = 6000

_ROOT = Path(__file__).parents[2]
_CHILD_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# vLLM's own warnings are not ours to fix, so the child does not make errors of them.
_CHILD_FLAGS = ["-W", "ignore"]


class ScenarioError(AssertionError):
    """Raised when the child ended badly. The text ends with its log."""


def run_scenario(
    scenario: Callable[..., Any],
    *,
    log_folder: Path,
    environment: Mapping[str, str] | None = None,
    **arguments: object,
) -> Any:
    """Call ``scenario(**arguments)`` in a new process and return its result.

    Arguments and result are JSON values. Raises ``ScenarioError`` if the child
    fails or hangs; it is killed then.
    """
    with start_scenario(scenario, log_folder, environment or {}, **arguments) as child:
        return child.result()


class Child:
    """A scenario under way, in the process ``process``."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path, told: Path) -> None:
        self.process = process
        self._name = name
        self._log = log
        self._told = told

    def result(self) -> Any:
        """Wait for the end and return what the scenario returned, or raise ``ScenarioError``."""
        try:
            ended = str(self.process.wait(PATIENCE_S))
        except subprocess.TimeoutExpired:
            ended = f"none within {PATIENCE_S} s"
        if ended != "0" or not self._told.exists():
            raise self.error(f"exit status {ended}")
        return json.loads(self._told.read_text())

    def wait_for(self, path: Path) -> str:
        """Wait until the scenario has written ``path`` whole; return the text."""
        until(lambda: path.exists() or self.process.poll() is not None)
        if not path.exists():
            raise self.error(f"no {path.name}")
        return path.read_text()

    def error(self, what: str) -> ScenarioError:
        """Return the error with the end of the child's log."""
        tail = self._log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
        return ScenarioError(f"{self._name}: {what}\n{tail}")


@contextmanager
def start_scenario(
    scenario: Callable[..., Any],
    log_folder: Path,
    environment: Mapping[str, str],
    **arguments: object,
) -> Iterator[Child]:
    """Start ``scenario`` in a new process group, which is killed at the end in any case."""
    log_folder.mkdir(parents=True, exist_ok=True)
    stem = log_folder / f"{scenario.__name__}-{time.monotonic_ns()}"
    log_path, result_path = stem.with_suffix(".log"), stem.with_suffix(".json")
    source = sys.modules[scenario.__module__].__file__
    assert source is not None
    call = json.dumps(
        {
            "file": source,
            "function": scenario.__name__,
            "arguments": arguments,
            "result": str(result_path),
        }
    )
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *_CHILD_FLAGS, "-m", "tests.vllm.children", call],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=child_environment(environment),
            start_new_session=True,
        )
    try:
        yield Child(scenario.__name__, process, log_path, result_path)
    finally:
        kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child that runs vLLM."""
    inherited = os.environ.get("PYTHONPATH", "")
    places = [str(_ROOT), str(_ROOT / "backends"), *filter(None, [inherited])]
    return {
        **os.environ,
        **_CHILD_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(places),
        **extra,
    }


def _child_main() -> None:
    call = json.loads(sys.argv[1])
    spec = importlib.util.spec_from_file_location("scenario", call["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scenario"] = module
    spec.loader.exec_module(module)
    result = getattr(module, call["function"])(**call["arguments"])
    Path(call["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    _child_main()
