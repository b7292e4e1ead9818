"""What the engine layer takes for right, without an engine: answers, refusals, and new weights."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from stress.engine import resets as weights_module
from stress.engine.answers import Reference, compare, reference_of
from stress.engine.clients import PAUSED, Clients
from stress.engine.questions import Question
from stress.engine.referee import Referee
from stress.engine.resets import REFUSALS, TRIES_MAX, WeightChanges
from stress.failure import Failure
from stress.plan import Fault

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio

OLD, NEW, NEWEST = "its own", "others", "those after them"
STEPS: Final = {OLD: 1, NEW: 3, NEWEST: 5}
PROMPT: Final = [10, 11, 12]


class Answer:
    """One answer over HTTP."""

    def __init__(self, status: int, said: Any) -> None:
        self.status = status
        self._said = said

    async def json(self) -> Any:
        return self._said

    async def text(self) -> str:
        return str(self._said)


class Server:
    """A server, and its session: what it answers is the test's."""

    def __init__(self) -> None:
        self.url = ""
        self.session: Any = self
        self.weights = [OLD]
        self.is_up, self.accepts = asyncio.Event(), asyncio.Event()
        self.is_up.set()
        self.accepts.set()
        self.resetting = asyncio.Lock()
        self.outages = self.pauses = 0
        self.asked: list[str] = []
        self._text = "it has started\n"

    def answer(self, _path: str, _body: Any) -> Answer:
        """Answer one call."""
        return Answer(200, {})

    @asynccontextmanager
    async def post(self, path: str, json: Any = None) -> AsyncIterator[Answer]:
        self.asked.append(path)
        yield self.answer(path, json)

    def begin_pause(self) -> None:
        self.pauses += 1
        self.accepts.clear()

    def assert_alive(self) -> None:
        """It is."""

    def log(self, since: int = 0) -> str:
        return self._text[since:]

    def log_bytes(self) -> int:
        return len(self._text)


# --- tokens ---


def test_an_answer_is_right_token_by_token_but_for_ties() -> None:
    best = [{"token_id:5": -1.0, "token_id:6": -1.0005}, {"token_id:7": -1.0, "token_id:8": -1.1}]
    right = reference_of({"token_ids": [5, 7], "logprobs": {"top_logprobs": best}})
    assert compare(right, [5, 7]).same == 2
    tie = compare(right, [6, 9])
    assert (tie.is_right, tie.is_tie, tie.same) == (True, True, 0)
    assert compare(right, [5]).is_right
    wrong = compare(right, [5, 8])
    assert not wrong.is_right
    assert wrong.text == "output token 1 is 8, and 7"


def best(before: list[int], weights: str) -> int:
    """Return the token that a model of these weights gives: all tokens before it matter."""
    return (sum(before) + STEPS[weights]) % 97


def answer(*parts: tuple[str, int]) -> list[int]:
    """Return what these weights compute, each so many tokens."""
    tokens: list[int] = []
    for weights, count in parts:
        for _ in range(count):
            tokens.append(best(PROMPT + tokens, weights))
    return tokens


class Computing(Server):
    """A server without offloading, which computes as ``best`` says."""

    def __init__(self, near: int | None = None) -> None:
        """``near``: this token is as good as the best, wherever it stands."""
        super().__init__()
        self._near = near

    def answer(self, path: str, body: Any) -> Answer:
        """Tell of each token of a prompt how likely it is; or take other weights."""
        if path != "/v1/completions":
            return Answer(200, {})
        assert body["prompt_logprobs"] == 1
        prompt = body["prompt"]
        found: list[Any] = [None]
        for place in range(1, len(prompt)):
            top = best(prompt[:place], self.weights[-1])
            own = -1.0005 if prompt[place] == self._near else -9.0
            figures = {prompt[place]: own} | {top: -1.0}
            found.append({str(token): {"logprob": value} for token, value in figures.items()})
        return Answer(200, {"choices": [{"prompt_logprobs": found}]})


async def right_until(tokens: list[int], *weights: str, near: int | None = None) -> int:
    models = {name: Path(name) for name in STEPS}
    referee = Referee(Computing(near), models)  # type: ignore[arg-type] # all that it asks
    question = Question(PROMPT, {OLD: Reference(answer((OLD, 40)), {})})
    return await referee.right_until(question, tokens, weights)


@pytest.mark.parametrize(
    ("tokens", "weights", "right"),
    [
        (answer((OLD, 0), (NEW, 5)), (OLD, NEW), 5),
        (answer((OLD, 7), (NEW, 5)), (OLD, NEW), 12),
        (answer((OLD, 2), (NEW, 3), (NEWEST, 4), (OLD, 5)), (OLD, NEW, NEWEST, OLD), 14),
        (answer((OLD, 2), (NEW, 3), (NEWEST, 4), (OLD, 5)), (OLD, NEW, NEWEST), 9),
        (answer((OLD, 2), (NEWEST, 4)), (OLD, NEW, NEWEST), 6),
        # In another order than they were there, and as without the beginning.
        (answer((NEW, 3), (OLD, 4)), (OLD, NEW), 3),
        (answer((OLD, 3), (NEWEST, 4), (NEW, 2)), (OLD, NEW, NEWEST), 7),
        (answer((OLD, 3)) + answer((NEW, 8))[3:], (OLD, NEW), 3),
    ],
)
async def test_tokens_are_of_the_weights_that_were_there_one_after_the_other(
    tokens: list[int], weights: tuple[str, ...], right: int
) -> None:
    assert await right_until(tokens, *weights) == right


@pytest.mark.parametrize("place", [0, 3, 4, 7])
async def test_one_wrong_token_is_found_wherever_it_stands(place: int) -> None:
    tokens = answer((OLD, 4), (NEW, 4))
    tokens[place] += 1
    assert await right_until(tokens, OLD, NEW) == place


async def test_a_token_that_is_as_good_is_right_and_so_is_only_what_follows_it() -> None:
    tokens = [*answer((OLD, 2)), 500]
    tokens.append(best(PROMPT + tokens, NEW))
    assert await right_until(tokens, OLD, NEW, near=500) == 4
    tokens[3] += 1
    assert await right_until(tokens, OLD, NEW, near=500) == 3


# --- refusals ---


class Refusing(Server):
    """A server that refuses everything: as one that is paused, or is ill."""

    def __init__(self, said: str, *, is_paused: bool) -> None:
        super().__init__()
        self._said = said
        self.has_refused = asyncio.Event()
        if is_paused:
            self.accepts.clear()

    def answer(self, _path: str, _body: Any) -> Answer:
        self.has_refused.set()
        return Answer(503, self._said)


def clients_of(server: Server) -> Clients:
    question = Question([3], {OLD: Reference([5] * 200, {})})
    return Clients(server, [question], seed=1)  # type: ignore[arg-type] # all that they ask of it


async def test_a_request_that_a_paused_server_refuses_is_no_failure() -> None:
    server = Refusing(f"{PAUSED}. Please retry.", is_paused=True)
    clients = clients_of(server)
    work = asyncio.create_task(clients.run(1))
    await server.has_refused.wait()
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


# --- weights ---


class Pausing(Server):
    """A server that refuses its first pauses for a reason that it logs."""

    def __init__(self, refusals: int = 0, reason: str = REFUSALS[0]) -> None:
        super().__init__()
        self._left = refusals
        self._reason = reason

    def answer(self, path: str, _body: Any) -> Answer:
        if not path.startswith("/pause") or not self._left:
            return Answer(200, "")
        self._left -= 1
        self._text += self._reason
        return Answer(500, "")


async def change(server: Server, target: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(weights_module, "STEPS_S", 0.0)
    models = {name: Path(name) for name in (OLD, NEW)}
    changes = WeightChanges(server, models, on_reset="new_generation")  # type: ignore[arg-type] # all that it asks
    return await changes.do(Fault(0.0, 0.0, "weights", target, "", random.Random(1)))


KEEP, WAIT = "/pause?mode=keep&clear_cache=true", "/pause?mode=wait&clear_cache="
LOAD, RESUME = "/collective_rpc", "/resume"


@pytest.mark.parametrize(
    ("target", "refusals", "asked", "weights"),
    [
        ("kept", 2, [*(2 * [KEEP, RESUME]), KEEP, LOAD, RESUME], [OLD, NEW]),
        ("kept", TRIES_MAX, [*(TRIES_MAX * [KEEP, RESUME]), RESUME], [OLD]),
        ("reset_before", 0, [f"{WAIT}true", LOAD, RESUME], [OLD, NEW]),
        ("reset_after", 0, [f"{WAIT}false", LOAD, weights_module.RESET, RESUME], [OLD, NEW]),
    ],
)
async def test_caches_are_reset_once_and_a_change_counts_only_if_it_was_made(
    target: str,
    refusals: int,
    asked: list[str],
    weights: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Pausing(refusals)
    assert await change(server, target, monkeypatch) == len(weights) - 1
    assert (server.asked, server.weights, server.accepts.is_set()) == (asked, weights, True)


async def test_a_pause_that_fails_for_another_reason_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Failure, match="/pause"):
        await change(Pausing(1, "KeyError: 5"), "kept", monkeypatch)
