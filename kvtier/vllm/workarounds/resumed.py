"""Tracks resumed requests that certainly wait: no other resumed request may load.

``reset_running_requests`` preempts running requests between two steps, and vLLM may look them up
again, and load for them, in the very next step. At that step's end it reports them as preempted,
and an older connector (``LOADS_WHEN_PREEMPTED`` in ``kvtier/vllm/releases.py``) treats a load of
such a request as its own error: the assertion ends the engine. This happens if the blocks are found
at once: if the reset was refused, or left the connector unchanged.

vLLM doesn't report which requests run: a preempted request is scheduled again without notice, and
a request preempted by a reset is reported as such at the end of the step that runs it again. So
lookups of a request that has run succeed only in the step after one in which it certainly waited.
Otherwise it gets RETRY, and waits one more step. Only the connector's result shows which requests
wait (``connector_hooks.py``): if chunks of several groups differ in length, a request
that got RETRY may run all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

NO_STEP: Final = -2


class Runs:
    """The steps in which one request ran, or waited."""

    __slots__ = ("have_run", "waited_before", "waits")

    def __init__(self) -> None:
        self.have_run = False
        self.waits = self.waited_before = NO_STEP  # the last two steps in which it certainly did


class ResumedRequests:
    """Decides which requests may load in a step. Scheduler thread."""

    def __init__(self, *, are_held_back: bool) -> None:
        """``are_held_back``: False if vLLM accepts a load in any step."""
        self._are_held_back = are_held_back
        self._step = 0
        self._is_empty = False  # nothing can be loaded in this step

    def may_load(self, runs: Runs) -> bool:
        """Return whether a request may load in this step; else it must look up again later."""
        if not (self._are_held_back and runs.have_run):
            return True
        waited = runs.waited_before if runs.waits == self._step else runs.waits
        return waited == self._step - 1 or self._is_empty

    def on_wait(self, runs: Runs) -> None:
        """Note that a request is not scheduled in this step, and looks up again in a later one."""
        if runs.waits != self._step:
            runs.waited_before, runs.waits = runs.waits, self._step

    def emptied(self) -> None:
        """Note that there is nothing to load, until the next step."""
        self._is_empty = True

    def end_step(self, scheduled: Iterable[Runs]) -> None:
        """Record vLLM's report of a step. ``scheduled``: requests that began, or began to load."""
        for runs in scheduled:
            runs.have_run = True
        self._step += 1
        self._is_empty = False
