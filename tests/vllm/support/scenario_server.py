"""Plays scenarios in forks of one process that has imported vLLM, which takes nine seconds.

``python -m tests.vllm.support.scenario_server`` reads calls from its standard input, a
JSON line each, and answers with the fork's process id. A fork leads a session
of its own, plays its scenario, and ends as any program does: with its exit
handlers, and after its threads. How it ended stands then in a file.

The server itself starts no thread, runs nothing of torch and has no engine, so
that a fork finds all as after an import of its own.

A fork ends as a program does up to its last exit handler. The interpreter's own end,
which takes apart all that was imported, is left out: it takes two seconds and copies the
whole heap. Servers, benchmarks and the tutorial's script are programs that end altogether.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import selectors
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tests.support.patient_limits import patient_limits
from tests.vllm.support.importing import importing_vllm
from tests.vllm.support.spawning import fork_what_is_spawned

if TYPE_CHECKING:
    from collections.abc import Callable


def serve() -> dict[str, Any] | None:
    """Fork for each call; return a fork's call in the fork, and None once there are no more."""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for ready, _ in selector.select():
                if ready.data is not None:
                    _tell_end(selector, ready)
                elif not (line := sys.stdin.readline()):
                    return None
                elif pid := os.fork():
                    call = json.loads(line)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, call["end"]))
                    sys.stdout.write(f"{pid}\n")
                    sys.stdout.flush()
                else:
                    return dict(json.loads(line))


def _tell_end(selector: selectors.BaseSelector, ended: selectors.SelectorKey) -> None:
    pid, path = ended.data
    _, status = os.waitpid(pid, 0)
    told = Path(path)
    half = told.with_suffix(".half")
    half.write_text(str(os.waitstatus_to_exitcode(status)))
    half.rename(told)
    selector.unregister(ended.fileobj)
    os.close(ended.fd)


def play(call: dict[str, Any]) -> None:
    """Call the scenario with the log as its standard output, and leave what it returns."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(call["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(call["environment"])
    # An engine that ends thaws the heap and collects it. What was imported is no garbage: to
    # walk through it takes a second, for each engine, and copies all of its pages.
    gc.unfreeze = _leave_frozen
    if call["spawns"]:
        fork_what_is_spawned()
    spec = importlib.util.spec_from_file_location("scenario", call["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scenario"] = module
    with patient_limits():
        spec.loader.exec_module(module)
        result = getattr(module, call["function"])(**call["arguments"])
    Path(call["result"]).write_text(json.dumps(result))


def _call(function: Callable[[], Any]) -> Any:
    return function()


def _leave_frozen() -> None:
    return


def _leave_registered() -> None:
    return


def end() -> NoReturn:
    """End this fork after its threads and its exit handlers, in a program's order."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _import_vllm() -> None:
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
    import vllm.entrypoints.llm
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.models.gemma3
    import vllm.model_executor.models.llama
    import vllm.plugins.lora_resolvers.filesystem_resolver
    import vllm.plugins.lora_resolvers.hf_hub_resolver
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    import kvtier.policies.eviction.reuse
    import kvtier.vllm.start  # noqa: F401
    import kvtier_backends.disk
    import kvtier_backends.fs
    import kvtier_backends.memory  # noqa: F401

    # It looks at a model's class in a process of its own, lest a GPU be claimed: there is none.
    registry._run_in_subprocess = _call

    # It walks through all that is imported, for half a second, once in each process.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = staticmethod(_leave_registered)


if __name__ == "__main__":
    with importing_vllm():
        _import_vllm()
    if (call := serve()) is not None:
        play(call)
        end()
