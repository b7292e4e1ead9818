"""What clients of the engine layer take for right, without an engine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from stress.engine.answers import Reference
from stress.engine.clients import PAUSED, Clients
from stress.engine.questions import Question
from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Return the loop that the layer runs on."""
    return "asyncio"


@dataclass
class Answer:
    """One answer over HTTP."""

    status: int
    said: str

    async def text(self) -> str:
        """Return all of it."""
        return self.said


class Refusing:
    """A server that refuses everything, and its session: as one that is paused, or is ill."""

    def __init__(self, said: str, *, is_paused: bool) -> None:
        self.said = said
        self.url = ""
        self.session = self
        self.is_up, self.accepts = asyncio.Event(), asyncio.Event()
        self.is_up.set()
        if not is_paused:
            self.accepts.set()
        self.outages = self.pauses = 0
        self.weights = ["its own"]
        self.asked = asyncio.Event()

    @asynccontextmanager
    async def post(self, _url: str, json: Any) -> AsyncIterator[Answer]:
        """Refuse one request."""
        del json
        self.asked.set()
        yield Answer(503, self.said)

    def assert_alive(self) -> None:
        """It is."""


def clients_of(server: Refusing) -> Clients:
    question = Question([3], {"its own": Reference([5] * 200, {})})
    return Clients(server, [question], seed=1)  # type: ignore[arg-type] # all that they ask of it


async def test_a_request_that_a_paused_server_refuses_is_no_failure() -> None:
    server = Refusing(f"{PAUSED}. Please retry.", is_paused=True)
    clients = clients_of(server)
    work = asyncio.create_task(clients.run(1))
    await server.asked.wait()
    clients.stop()
    server.accepts.set()
    await work
    assert (clients.counts["paused"], clients.requests) == (1, 0)


@pytest.mark.parametrize(
    ("said", "is_paused"), [(f"{PAUSED}. Please retry.", False), ("out of memory", True)]
)
async def test_any_other_refusal_is_a_failure(said: str, *, is_paused: bool) -> None:
    clients = clients_of(Refusing(said, is_paused=is_paused))
    with pytest.raises(ExceptionGroup) as failures:
        await clients.run(1)
    assert failures.group_contains(Failure, match=said[:8])
