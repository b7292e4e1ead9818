"""Which requests that have run are known to wait: nobody else is told what it can load.

``reset_running_requests`` throws running requests back between two steps, and vLLM may look
them up again, and load for them, in the very next step. At that step's end it reports them as
preempted, and the connector of 0.32 takes a load of such a request for a mistake of its own: the
assertion ends the engine. It comes where the blocks are found at once: where the reset was
refused, or left the connector as it was. vLLM 0.33 has mended that.

vLLM doesn't tell who runs: a request that was preempted is scheduled again without a word, and
what a reset threw back is reported as preempted at the end of the step that runs it again. So one
that has run is told what it can load in the step after one in which it waited for certain.
Otherwise it is to ask again, and waits for one step more. Who waits only the connector's answer
tells (``kvtier/vllm/connector_hooks.py``): where chunks of several groups differ in length, a
request that was to ask again may run all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ResumedRequests:
    """What is known of requests that have run, from one step to the next."""

    def __init__(self, *, are_held_back: bool) -> None:
        """``are_held_back``: False where vLLM takes a load in any step."""
        self._are_held_back = are_held_back
        self._have_run: set[str] = set()
        self._waited: set[str] = set()  # in the last step, for certain
        self._wait: set[str] = set()  # in this one
        self._is_empty = False  # nothing can be loaded in this step

    def end(self, request: str) -> None:
        """Note that a request is over."""
        self._have_run.discard(request)
        self._waited.discard(request)
        self._wait.discard(request)

    def may_load(self, request: str) -> bool:
        """Tell whether a request may be told what it can load; else it is to ask again."""
        if not (self._are_held_back and request in self._have_run):
            return True
        return request in self._waited or self._is_empty

    def on_wait(self, request: str) -> None:
        """Note that a request is not scheduled in this step, and asks again in a later one."""
        self._wait.add(request)

    def emptied(self) -> None:
        """Note that there is nothing to load, until the next step."""
        self._is_empty = True

    def end_step(self, scheduled: Iterable[str]) -> None:
        """Take in what vLLM reports of a step. ``scheduled``: for the first time, or to load."""
        self._have_run.update(scheduled)
        self._waited, self._wait = self._wait, self._waited
        self._wait.clear()
        self._is_empty = False
