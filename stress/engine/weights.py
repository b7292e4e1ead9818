"""The weights of a server are replaced while it runs, as in reinforcement learning."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from stress.engine.resets import is_done_or_refused
from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stress.engine.vllm_server import Server
    from stress.plan import Fault

RESET: Final = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
TRIES_MAX: Final = 20
STEPS_S: Final = 0.3  #: so long what is on its way may arrive, before the next try


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
