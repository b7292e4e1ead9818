"""Tracks the worker that vLLM keeps in this process, if the whole engine runs in one process.

That is so in a notebook with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``. vLLM keeps one KV connector for
the workers of a process, for the engine that requested it first, and creates no second one while it
exists. If the scheduler refuses an engine, the connector stays, and keeps its memory mapped: the
process's next engine would find no worker of its own, even after the configuration was fixed.
"""

from __future__ import annotations

from typing import Final

from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, has_kv_transfer_group

WORKER_OF_ANOTHER: Final = (
    "this process still holds the worker of an engine that it had before, and vLLM makes no second "
    "one beside it. End that engine (del llm); if it is gone already, call "
    "vllm.distributed.kv_transfer.ensure_kv_transfer_shutdown(), and start this one again."
)


class WorkerHere:
    """The engine whose worker this process holds. One a process; the thread that starts engines."""

    def __init__(self) -> None:
        self._engine_id: str | None = None

    def note(self, engine_id: str) -> None:
        """Note that an engine's worker was made in this process."""
        self._engine_id = engine_id

    def is_of_another(self, engine_id: str) -> bool:
        """Return whether vLLM holds a worker of another engine here."""
        return bool(has_kv_transfer_group()) and self._engine_id != engine_id

    def release(self, engine_id: str) -> None:
        """End the worker of an engine whose start failed, if it is in this process."""
        if self._engine_id == engine_id:
            self._engine_id = None
            ensure_kv_transfer_shutdown()


WORKER_HERE: Final = WorkerHere()
