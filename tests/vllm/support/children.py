"""Runs scenarios on a real vLLM engine, each in a process of its own.

vLLM keeps state in module globals and environment variables, so a scenario is
a plain function at module level that a child process calls; its JSON result is
what the test looks at. ``tests/vllm/support/scenario_server.py`` makes these processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.patience import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LOG_TAIL_CHARACTERS = 6000

_ROOT = Path(__file__).parents[3]
_CHILD_ENVIRONMENT = {
    # vLLM compiles small functions even with enforce_eager, for which it wants a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
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
    spawns: bool = False,
    **arguments: object,
) -> Any:
    """Call ``scenario(**arguments)`` in a new process and return its result.

    Arguments and result are JSON values. Raises ``ScenarioError`` if the child
    fails or hangs; it is killed then. ``spawns`` says that vLLM will start
    processes of its own (``tests/vllm/support/spawning.py``).
    """
    with start_scenario(scenario, log_folder, environment or {}, spawns, **arguments) as child:
        return child.result()


class Child:
    """A scenario under way, in the process ``pid``, which leads a session."""

    def __init__(self, name: str, pid: int, stem: Path) -> None:
        self.pid = pid
        self._name = name
        self._log = stem.with_suffix(".log")
        self._told = stem.with_suffix(".json")
        self._end = stem.with_suffix(".end")

    def result(self) -> Any:
        """Wait for the end and return what the scenario returned, or raise ``ScenarioError``."""
        until(self.has_ended, lambda: str(self.error(f"no end within {PATIENCE_S} s")))
        status = int(self._end.read_text())
        if status != 0 or not self._told.exists():
            raise self.error(f"exit status {status}")
        return json.loads(self._told.read_text())

    def has_ended(self) -> bool:
        """Tell whether it has ended, well or badly."""
        return self._end.exists()

    def kill(self) -> int:
        """Kill it, if it still runs, and all that it has started; return its exit status."""
        with suppress(ProcessLookupError):  # not yet the leader, or the end of all
            os.killpg(self.pid, signal.SIGKILL)
        if not self.has_ended():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        until(self.has_ended)
        return int(self._end.read_text())

    def wait_for(self, path: Path) -> str:
        """Wait until the scenario has written ``path`` whole; return the text."""
        until(lambda: path.exists() or self.has_ended())
        if not path.exists():
            raise self.error(f"no {path.name}")
        return path.read_text()

    def log(self) -> str:
        """Return its log."""
        return self._log.read_text(errors="replace")

    def error(self, what: str) -> ScenarioError:
        """Return the error with the end of the child's log."""
        return ScenarioError(f"{self._name}: {what}\n{self.log()[-LOG_TAIL_CHARACTERS:]}")


@contextmanager
def start_scenario(
    scenario: Callable[..., Any],
    log_folder: Path,
    environment: Mapping[str, str],
    spawns: bool = False,
    **arguments: object,
) -> Iterator[Child]:
    """Start ``scenario`` in a session of its own, which is killed at the end in any case.

    ``environment`` is set after Python, torch and vLLM have been imported. ``spawns`` as
    in ``run_scenario``.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    stem = log_folder / f"{scenario.__name__}-{time.monotonic_ns()}"
    source = sys.modules[scenario.__module__].__file__
    assert source is not None
    call = {
        "file": source,
        "function": scenario.__name__,
        "arguments": arguments,
        "environment": child_environment(environment),
        "spawns": spawns,
        "log": str(stem.with_suffix(".log")),
        "result": str(stem.with_suffix(".json")),
        "end": str(stem.with_suffix(".end")),
    }
    child = Child(scenario.__name__, _fork(call), stem)
    try:
        yield child
    finally:
        child.kill()


def _fork(call: Mapping[str, Any]) -> int:
    """Have the scenario server play ``call``; return the process's id."""
    server = _scenario_server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(call) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, f"the scenario server has ended with {server.wait()}"
    return int(answer)


@cache
def _scenario_server() -> subprocess.Popen[str]:
    """Start the server, which ends when its standard input does: with these tests."""
    return subprocess.Popen(
        [sys.executable, *_CHILD_FLAGS, "-m", "tests.vllm.support.scenario_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment({}),
        start_new_session=True,
        text=True,
    )


def run_program(
    *arguments: str | Path,
    folder: Path = _ROOT,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = PATIENCE_S,
) -> str:
    """Have Python run a program that starts vLLM; return what it prints, once it has ended well."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=child_environment(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-LOG_TAIL_CHARACTERS:]
    return ended.stdout


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
