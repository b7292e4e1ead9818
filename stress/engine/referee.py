"""Who judges answers that were begun with some weights, and ended with others.

vLLM's ``/pause?mode=wait`` lets end what runs. A request that is preempted at that moment
doesn't run: it has no KV, waits, and goes on with the weights of after the pause. So its answer
has tokens of the old weights, and then what the new ones give after the prompt and those tokens.
No answer of one kind of weights tells whether that is right. A server without offloading does:
it is given prompt and answer, and says for each token whether it is the best one at its place.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from stress.engine.answers import TIE_LOGPROB, compare
from stress.engine.resets import RESET, load_weights, post
from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from stress.engine.questions import Question
    from stress.engine.vllm_server import Server


class Referee:
    """Asks a server without offloading, one question at a time."""

    def __init__(self, reference: Server, models: Mapping[str, Path]) -> None:
        """``models``: weights → their folder."""
        self._server = reference
        self._models = models
        self._asking = asyncio.Lock()

    async def right_until(
        self, question: Question, tokens: list[int], weights: Sequence[str]
    ) -> int:
        """Return how many tokens are right, if ``weights`` computed them one after the other.

        Each weights' part is taken as long as it can be. That loses nothing: which token is
        right depends on the tokens before it, and not on who computed them.
        """
        first, *later = weights
        place = compare(question.answers[first], tokens).same
        for each in later:
            right = await self._right_tokens(question.prompt, tokens, each)
            while place < len(tokens) and right[place]:
                place += 1
        return place

    async def _right_tokens(self, prompt: list[int], tokens: list[int], weights: str) -> list[bool]:
        """Tell of each token whether these weights could have given it after those before it."""
        body = {
            "prompt": [*prompt, *tokens],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 1,  # the best at each place, and the one that stands there
        }
        async with self._asking:
            if self._server.weights[-1] != weights:
                await load_weights(self._server, self._models, weights)
                await post(self._server, RESET)
            async with self._server.session.post(
                f"{self._server.url}/v1/completions", json=body
            ) as answer:
                if answer.status != 200:
                    raise Failure(f"the referee: {answer.status} {await answer.text()}")
                (choice,) = (await answer.json())["choices"]
        return right_tokens(choice["prompt_logprobs"][len(prompt) :], tokens)


def right_tokens(found: Sequence[Mapping[str, Any]], tokens: list[int]) -> list[bool]:
    """Tell of each token whether it is the best at its place, or as good.

    ``found``: for each place the log probabilities of the best token and of the one there.
    """
    return [
        max(each["logprob"] for each in best.values()) - best[str(token)]["logprob"] < TIE_LOGPROB
        for best, token in zip(found, tokens, strict=True)
    ]
