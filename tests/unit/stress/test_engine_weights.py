"""How the engine layer changes a server's weights, without an engine."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from stress.engine import weights
from stress.engine.resets import REFUSALS
from stress.engine.weights import TRIES_MAX, WeightChanges
from stress.failure import Failure
from stress.plan import Fault

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio

MODELS: Final = {"its own": Path("own"), "others": Path("others")}
KEEP: Final = "/pause?mode=keep&clear_cache=true"


@pytest.fixture
def anyio_backend() -> str:
    """Return the loop that the layer runs on."""
    return "asyncio"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again without a wait."""
    monkeypatch.setattr(weights, "STEPS_S", 0.0)


class Answer:
    """One answer over HTTP."""

    def __init__(self, status: int) -> None:
        self.status = status

    async def text(self) -> str:
        """Say nothing."""
        return ""


class Server:
    """A server, and its session, that refuses its first pauses for a reason that it logs."""

    def __init__(self, refusals: int = 0, reason: str = REFUSALS[0]) -> None:
        self.url = ""
        self.session = self
        self.weights = ["its own"]
        self.resetting, self.accepts = asyncio.Lock(), asyncio.Event()
        self.pauses = 0
        self.asked: list[str] = []
        self._left = refusals
        self._reason = reason
        self._log = "it has started\n"

    @asynccontextmanager
    async def post(self, path: str, json: Any = None) -> AsyncIterator[Answer]:
        """Note a call, and answer it."""
        del json
        self.asked.append(path)
        is_refused = path.startswith("/pause") and self._left > 0
        if is_refused:
            self._left -= 1
            self._log += self._reason
        yield Answer(500 if is_refused else 200)

    def begin_pause(self) -> None:
        """Tell that it pauses."""
        self.pauses += 1
        self.accepts.clear()

    def log(self, since: int = 0) -> str:
        """Return what was logged since."""
        return self._log[since:]

    def log_bytes(self) -> int:
        """Return how much was logged."""
        return len(self._log)


async def change(server: Server, target: str) -> int:
    changes = WeightChanges(server, MODELS, on_reset="new_generation")  # type: ignore[arg-type] # all that it asks
    return await changes.do(Fault(0.0, 0.0, "weights", target, "", random.Random(1)))


async def test_what_vllm_refuses_to_throw_back_goes_on_before_the_next_try() -> None:
    server = Server(refusals=2)
    assert await change(server, "kept") == 1
    assert server.asked == [KEEP, "/resume", KEEP, "/resume", KEEP, "/collective_rpc", "/resume"]
    assert server.weights == ["its own", "others"]
    assert server.accepts.is_set()


async def test_weights_stay_if_vllm_never_throws_back_what_runs() -> None:
    server = Server(refusals=TRIES_MAX)
    assert await change(server, "kept") == 0
    assert server.weights == ["its own"]
    assert (server.asked[-1], server.accepts.is_set()) == ("/resume", True)


async def test_a_pause_that_fails_for_another_reason_is_a_failure() -> None:
    with pytest.raises(Failure, match="/pause"):
        await change(Server(refusals=1, reason="KeyError: 5"), "kept")


@pytest.mark.parametrize(("target", "resets"), [("reset_before", 0), ("reset_after", 1)])
async def test_caches_are_reset_once_before_or_after_weights_change(
    target: str, resets: int
) -> None:
    server = Server()
    assert await change(server, target) == 1
    clears = str(target == "reset_before").lower()
    assert server.asked[:2] == [f"/pause?mode=wait&clear_cache={clears}", "/collective_rpc"]
    assert server.asked[2:] == [weights.RESET] * resets + ["/resume"]
