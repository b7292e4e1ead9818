"""Resets of a server's caches, and weights that are replaced, as in reinforcement learning."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

from stress.engine.faults import QUERIES
from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stress.engine.vllm_server import Server
    from stress.plan import Fault

REFUSALS: Final = (
    # Requests whose KV is on its way can't be thrown back.
    "Failed to reset KV cache even when all the running requests are",
    # Two resets without a step between them. kvtier has not been asked yet.
    "assert not self._current_batch_jobs_to_flush",
)
"""What vLLM's log says when vLLM itself refuses to reset."""

_REFUSED: Final = (
    "Call to reset_prefix_cache method failed",
    "Call to pause_scheduler method failed",
)


_LIMITED: Final = re.compile(
    r"""Traceback.*\n
    \ \ File\ "<string>",\ line\ 1,\ in\ <module>\n       # the program of a tier's process
    (?:\ .*kvtier/hosts/process_main\.py.*\n)(?:\ .*\n)*
    (?:OSError:\ \[Errno\ (?:12|24)\]|MemoryError|RuntimeError:\ can't\ start\ new\ thread)""",
    re.VERBOSE,
)


RESET: Final = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
TRIES_MAX: Final = 20
STEPS_S: Final = 0.3  #: so long what is on its way may arrive, before the next try


class Resets:
    """Does them."""

    def __init__(self, running: Server) -> None:
        self._server = running

    async def do(self, fault: Fault) -> int:
        """Reset once. Raises ``Failure`` if that is refused for another reason than vLLM's."""
        async with self._server.resetting:
            await is_done_or_refused(self._server, f"/reset_prefix_cache{QUERIES[fault.target]}")
        return 1


async def is_done_or_refused(running: Server, path: str) -> bool:
    """Have caches reset; False: vLLM refuses. Raises ``Failure`` for another reason than its own.

    ``resetting`` must be held: what the log says must be of this call.
    """
    before = running.log_bytes()
    async with running.session.post(running.url + path) as answer:
        text = await answer.text()
        log = running.log(before)
    if answer.status == 200:
        return True
    if answer.status == 500 and any(each in log for each in REFUSALS):
        return False
    raise Failure(f"{path}: {answer.status} {text}")


class WeightChanges:
    """Makes them: nothing that was stored before one may be read after it."""

    def __init__(self, running: Server, models: Mapping[str, Path], *, on_reset: str) -> None:
        """``models``: weights → their folder; ``on_reset``: as configured."""
        self._server = running
        self._models = models
        self._on_reset = on_reset

    async def do(self, fault: Fault) -> int:
        """Change them once; 0: it can't be done here, or now. Raises ``Failure``.

        The fault's target says when caches are reset, and what becomes of running requests:
        as vLLM pauses, or once there are new weights, they have ended, but for those that were
        preempted; ``kept``: all of them are thrown back, and go on with the new weights.
        """
        if self._on_reset == "keep":
            return 0
        running = self._server
        async with running.resetting:
            running.begin_pause()
            is_done = await self._pause(fault.target)
            if is_done:
                (weights,) = set(self._models) - {running.weights[-1]}
                await load_weights(running, self._models, weights)
                if fault.target == "reset_after":
                    await post(running, RESET)
            await post(running, "/resume")
            running.accepts.set()
        return int(is_done)

    async def _pause(self, target: str) -> bool:
        """Pause; False: vLLM refuses to throw back what runs, since KV is on its way to it."""
        if target != "kept":
            as_it_pauses = str(target == "reset_before").lower()
            await post(self._server, f"/pause?mode=wait&clear_cache={as_it_pauses}")
            return True
        for _ in range(TRIES_MAX):
            if await is_done_or_refused(self._server, "/pause?mode=keep&clear_cache=true"):
                return True
            await post(self._server, "/resume")
            await asyncio.sleep(STEPS_S)
        return False


async def load_weights(running: Server, models: Mapping[str, Path], weights: str) -> None:
    """Have a server that does nothing else load other weights. Raises ``Failure``."""
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(models[weights])}}
    running.weights.append(weights)
    await post(running, "/collective_rpc", call)


async def post(running: Server, path: str, body: Mapping[str, Any] | None = None) -> None:
    """POST; raises ``Failure`` for an answer that is not 200."""
    async with running.session.post(running.url + path, json=body) as answer:
        if answer.status != 200:
            raise Failure(f"{path}: {answer.status} {await answer.text()}")


def check_log(log: str) -> None:
    """Raise ``Failure`` for a traceback without a known reason.

    Known are vLLM's own refusals to reset, and the limits that faults set to a tier's process:
    one that has just been started meets them before it serves, and says so.
    """
    for each in re.split(r"(?=Traceback \(most recent call last\))", log)[1:]:
        is_refusal = any(known in each for known in (*REFUSALS, *_REFUSED))
        if not is_refusal and not _LIMITED.match(each):
            raise Failure(f"a traceback in the server's log: {each[:4000]}")
