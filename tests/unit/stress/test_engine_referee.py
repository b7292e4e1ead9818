"""Which answers the engine layer takes for right when weights change while they are computed."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from stress.engine.answers import Reference
from stress.engine.questions import Question
from stress.engine.referee import Referee

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio

OLD, NEW, NEWEST = "its own", "others", "those after them"
STEPS: Final = {OLD: 1, NEW: 3, NEWEST: 5}
MODELS: Final = {name: Path(name) for name in STEPS}
PROMPT: Final = [10, 11, 12]


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


@pytest.fixture
def anyio_backend() -> str:
    """Return the loop that the layer runs on."""
    return "asyncio"


class Answer:
    """One answer over HTTP."""

    def __init__(self, said: Any) -> None:
        self.status = 200
        self._said = said

    async def json(self) -> Any:
        """Return it."""
        return self._said

    async def text(self) -> str:
        """Return it as text."""
        return str(self._said)


class Computing:
    """A server without offloading, and its session: it computes as ``best`` says."""

    def __init__(self, near: int | None = None) -> None:
        """``near``: this token is as good as the best, wherever it stands."""
        self.url = ""
        self.session = self
        self.weights = [OLD]
        self._near = near

    @asynccontextmanager
    async def post(self, url: str, json: Any) -> AsyncIterator[Answer]:
        """Load weights, or tell of each token of a prompt how likely it is."""
        if url != "/v1/completions":
            yield Answer({})
            return
        assert json["prompt_logprobs"] == 1
        prompt = json["prompt"]
        found: list[Any] = [None]
        for place in range(1, len(prompt)):
            top = best(prompt[:place], self.weights[-1])
            own = -1.0005 if prompt[place] == self._near else -9.0
            figures = {prompt[place]: own} | {top: -1.0}
            found.append({str(token): {"logprob": value} for token, value in figures.items()})
        yield Answer({"choices": [{"prompt_logprobs": found}]})


async def right_until(tokens: list[int], *weights: str, server: Computing | None = None) -> int:
    referee = Referee(server or Computing(), MODELS)  # type: ignore[arg-type] # all that it asks
    question = Question(PROMPT, {OLD: Reference(answer((OLD, 40)), {})})
    return await referee.right_until(question, tokens, weights)


@pytest.mark.parametrize("begun", [0, 3, 7])
async def test_what_was_begun_with_old_weights_may_go_on_with_the_new(begun: int) -> None:
    assert await right_until(answer((OLD, begun), (NEW, 5)), OLD, NEW) == begun + 5


async def test_weights_may_change_more_than_once_meanwhile() -> None:
    tokens = answer((OLD, 2), (NEW, 3), (NEWEST, 4), (OLD, 5))
    assert await right_until(tokens, OLD, NEW, NEWEST, OLD) == len(tokens)
    assert await right_until(tokens, OLD, NEW, NEWEST) == 9


async def test_some_weights_may_have_computed_nothing() -> None:
    assert await right_until(answer((OLD, 2), (NEWEST, 4)), OLD, NEW, NEWEST) == 6


async def test_weights_that_were_there_in_another_order_are_wrong() -> None:
    assert await right_until(answer((NEW, 3), (OLD, 4)), OLD, NEW) == 3
    assert await right_until(answer((OLD, 3), (NEWEST, 4), (NEW, 2)), OLD, NEW, NEWEST) == 7


async def test_what_goes_on_as_without_its_beginning_is_wrong() -> None:
    alone = answer((NEW, 8))
    assert await right_until(answer((OLD, 3)) + alone[3:], OLD, NEW) == 3


@pytest.mark.parametrize("place", [0, 3, 4, 7])
async def test_one_wrong_token_is_found_wherever_it_stands(place: int) -> None:
    tokens = answer((OLD, 4), (NEW, 4))
    tokens[place] += 1
    assert await right_until(tokens, OLD, NEW) == place


async def test_a_token_that_is_as_good_is_right_and_so_is_only_what_follows_it() -> None:
    tokens = [*answer((OLD, 2)), 500]
    tokens.append(best(PROMPT + tokens, NEW))
    assert await right_until(tokens, OLD, NEW, server=Computing(near=500)) == 4
    tokens[3] += 1
    assert await right_until(tokens, OLD, NEW, server=Computing(near=500)) == 3
