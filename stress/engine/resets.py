"""Resets of a server's caches, as before weights are replaced."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from stress.engine.faults import QUERIES
from stress.failure import Failure

if TYPE_CHECKING:
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


def check_log(log: str) -> None:
    """Raise ``Failure`` for a traceback without a known reason.

    Known are vLLM's own refusals to reset, and the limits that faults set to a tier's process:
    one that has just been started meets them before it serves, and says so.
    """
    for each in re.split(r"(?=Traceback \(most recent call last\))", log)[1:]:
        is_refusal = any(known in each for known in (*REFUSALS, *_REFUSED))
        if not is_refusal and not _LIMITED.match(each):
            raise Failure(f"a traceback in the server's log: {each[:4000]}")
