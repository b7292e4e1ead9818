"""The processes that vLLM spawns, as forks of a process that has imported vLLM.

vLLM spawns its engine cores and workers, each of which imports all of it, for twelve
seconds. Python's own fork server makes the same of them: a process that gets what it is to
do as a pickle, and shares nothing with who asked for it. It is forked here before it is
needed, from a scenario's process that is as after its imports. So it is of the scenario's
session, and a kill of the group takes all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from multiprocessing import connection, context, forkserver, resource_tracker
from typing import Any


class Forked(context.ForkServerProcess):
    """A process that has the environment of who starts it, as a spawned one has."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def _bootstrap(self, *arguments: Any, **options: Any) -> Any:
        os.environ.clear()
        os.environ.update(self._environment)
        return super()._bootstrap(*arguments, **options)  # type: ignore[misc]


class ForkedContext(context.ForkServerContext):
    """What ``multiprocessing.get_context`` returns for those who would spawn."""

    Process = Forked


def fork_what_is_spawned() -> None:
    """Fork a fork server, and have it make all that this process and its own would spawn."""
    address = connection.arbitrary_address("AF_UNIX")
    alive_read, alive_write = os.pipe()
    server = forkserver._forkserver
    server.ensure_running = resource_tracker.ensure_running  # it is: nobody starts another
    real = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return ForkedContext() if method == "spawn" else real(method)

    multiprocessing.get_context = get_context
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        if not os.fork():
            os.close(alive_write)
            try:
                forkserver.main(listener.detach(), alive_read, [])
            finally:
                os._exit(0)
    os.close(alive_read)
    server._forkserver_address = address
    server._forkserver_alive_fd = alive_write
