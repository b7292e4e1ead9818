"""Clients of a vLLM HTTP server that share prefixes, leave midway, and check every token.

Tokens are compared with those that a server without offloading gave:
``answers`` says how.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from stress.engine.answers import compare, reference_of
from stress.engine.questions import OF_ONE_DOCUMENT
from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stress.engine.questions import Question
    from stress.engine.referee import Referee
    from stress.engine.vllm_server import Server

OUTPUT_TOKENS_MAX = 48  #: running requests grow, and so push each other out
CHOICES_MAX = 3
LEAVES_AFTER_S_MAX = 8.0
REFERENCES_AT_ONCE = 8
PAUSED = "Generation is paused"
REQUEST_S_MAX = 300.0
"""How long one request may take, among 64 on a busy machine: what hangs takes longer."""


class Unanswered(Failure):
    """A request ended without its whole answer: while the server is restarted, that may be."""


class Paused(Unanswered):
    """A request was refused since the server is paused: vLLM 0.33 does so, 0.32 lets it wait."""


@dataclass(frozen=True)
class Asked:
    """One request."""

    question: Question
    body: dict[str, Any]
    changes: int  #: of the server's weights until then, its own included


async def answer_all(server: Server, questions: Sequence[Question]) -> None:
    """Let a server without offloading answer every question, some at a time."""
    unanswered = iter(questions)

    async def ask() -> None:
        for question in unanswered:
            await _answer(server, question)

    await asyncio.gather(*(ask() for _ in range(REFERENCES_AT_ONCE)))


async def _answer(server: Server, question: Question) -> None:
    body = _body(question, OUTPUT_TOKENS_MAX) | {
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    async with server.session.post(f"{server.url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise Failure(f"without offloading: {answer.status} {await answer.text()}")
        (choice,) = (await answer.json())["choices"]
    question.answers[server.weights[-1]] = reference_of(choice)


class Clients:
    """Some clients at once, until they are told to stop."""

    def __init__(
        self,
        server: Server,
        questions: Sequence[Question],
        seed: int,
        referee: Referee | None = None,
    ) -> None:
        """``referee``: of a server whose weights change."""
        self.counts: Counter[str] = Counter()
        self.requests = 0  #: that ended as they should, or were left
        self._server = server
        self._questions = questions
        self._asked = questions[:-OF_ONE_DOCUMENT] or questions
        self._seed = seed
        self._referee = referee
        self._stop = asyncio.Event()

    async def run(self, count: int) -> None:
        """Ask until ``stop``, and end what is under way. Raises ``Failure``."""
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(self._client(random.Random(f"{self._seed}:{number}")))

    def ask_all(self) -> None:
        """Ask about the last document, too, which was kept back: no tier has a block of it.

        What one tier has is loaded from there, and stored in no other: a tier that faults have
        emptied serves nothing until there is something new to compute.
        """
        self._asked = self._questions

    def stop(self) -> None:
        """Begin nothing more."""
        self._stop.set()

    async def _client(self, dice: random.Random) -> None:
        behaviours: Sequence[tuple[int, Callable[[random.Random], Any]]] = (
            (3, self._read_whole),
            (3, self._stream_whole),
            (2, self._leave_unread),
            (3, self._leave_in_stream),
        )
        weights = [weight for weight, _ in behaviours]
        while not self._stop.is_set():
            ((_, behave),) = dice.choices(behaviours, weights)
            name = behave.__name__.strip("_")
            await self._server.is_up.wait()
            outages, pauses = self._server.outages, self._server.pauses
            was_paused = not self._server.accepts.is_set()
            try:
                async with asyncio.timeout(REQUEST_S_MAX):
                    await behave(dice)
            except Paused as error:
                if self._server.pauses == pauses and not was_paused:
                    raise Failure(f"{name}: {error!r}") from error
                self.counts["paused"] += 1
                await self._server.accepts.wait()
            except (aiohttp.ClientError, Unanswered) as error:
                if self._server.outages == outages:
                    self._server.assert_alive()
                    raise Failure(f"{name}: {error!r}") from error
                self.counts["cut_off"] += 1
            except TimeoutError:
                raise Failure(f"{name}: no whole answer for {REQUEST_S_MAX:g} s") from None
            else:
                self.counts[name] += 1
                self.requests += 1

    # --- what a client does with one request ---

    async def _read_whole(self, dice: random.Random) -> None:
        asked = self._ask(dice)
        async with self._server.session.post(self._url(), json=asked.body) as answer:
            await _expect_success(answer)
            choices = (await answer.json())["choices"]
        for choice in choices:
            self._check_end(choice["finish_reason"])
            await self._check(asked, choice["token_ids"], asked.body["max_tokens"])
        if len(choices) != asked.body["n"]:
            raise Unanswered(f"{len(choices)} choices, not {asked.body['n']}")

    async def _stream_whole(self, dice: random.Random) -> None:
        await self._stream(dice, chunks_max=None)

    async def _leave_in_stream(self, dice: random.Random) -> None:
        await self._stream(dice, chunks_max=dice.randrange(OUTPUT_TOKENS_MAX))

    async def _leave_unread(self, dice: random.Random) -> None:
        """Leave before the answer, mostly: while it waits, is promoted, loaded or computed."""
        body = self._ask(dice).body
        leaves_after_s = dice.choice([0.02, 0.2, 1.0]) * dice.uniform(0, LEAVES_AFTER_S_MAX)
        try:
            async with asyncio.timeout(leaves_after_s):
                async with self._server.session.post(self._url(), json=body) as answer:
                    await _expect_success(answer)
                    await answer.read()
        except TimeoutError:
            self.counts["left_unread"] += 1

    async def _stream(self, dice: random.Random, chunks_max: int | None) -> None:
        asked = self._ask(dice)
        body = asked.body
        tokens: dict[int, list[int]] = {number: [] for number in range(body["n"])}
        ended: set[int] = set()
        chunks = 0
        async with self._server.session.post(self._url(), json=body | {"stream": True}) as answer:
            await _expect_success(answer)
            async for line in answer.content:
                if chunks == chunks_max:
                    break
                text = line.decode().strip().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                chunks += 1
                chunk = json.loads(text)
                if "choices" not in chunk:
                    raise _refusal(f"in a stream: {text}")
                for choice in chunk["choices"]:
                    tokens[choice["index"]] += choice["token_ids"] or []
                    if choice["finish_reason"] is not None:
                        self._check_end(choice["finish_reason"])
                        ended.add(choice["index"])
        if chunks_max is None and ended != set(tokens):
            raise Unanswered(f"a stream of {body['n']} choices ended with {sorted(ended)} complete")
        for number, each in tokens.items():
            await self._check(asked, each, body["max_tokens"] if number in ended else len(each))

    def _ask(self, dice: random.Random) -> Asked:
        question = dice.choice(self._asked)
        body = _body(question, dice.randrange(1, OUTPUT_TOKENS_MAX + 1))
        if dice.random() < 0.2:
            # Greedy as well, in vLLM's sampler: it wants a temperature for several choices.
            body |= {"n": dice.randrange(2, CHOICES_MAX + 1), "temperature": 1.0, "top_k": 1}
        return Asked(question, body, len(self._server.weights))

    def _url(self) -> str:
        return f"{self._server.url}/v1/completions"

    # --- what must be true of every answer ---

    def _check_end(self, reason: str) -> None:
        if reason != "length":
            raise Unanswered(f"an answer ended with {reason!r}, not 'length'")

    async def _check(self, asked: Asked, tokens: list[int], expected: int) -> None:
        """Compare an answer with the one right one; while weights change, there are more."""
        if len(tokens) != expected:
            raise Unanswered(f"{len(tokens)} tokens, not {expected}")
        weights = self._server.weights[asked.changes - 1 :]
        differences = {each: compare(asked.question.answers[each], tokens) for each in weights}
        right = next((each for each in differences.values() if each.is_right), None)
        if right is not None:
            self.counts["tokens"] += right.same
            self.counts["ties"] += right.is_tie
            return
        wrong = [f"{each.text} without offloading, with {w}" for w, each in differences.items()]
        if self._referee is not None and len(weights) > 1:
            until = await self._referee.right_until(asked.question, tokens, weights)
            if until == len(tokens):
                self.counts["tokens"] += until
                self.counts["of_more_weights"] += 1
                return
            wrong.append(f"token {until} is of none of {', '.join(weights)}, one after the other")
        prompt = self._questions.index(asked.question)
        raise Failure(f"prompt {prompt} of {len(asked.question.prompt)} tokens: {'; '.join(wrong)}")


async def _expect_success(answer: aiohttp.ClientResponse) -> None:
    if answer.status == 200:
        return
    raise _refusal(f"status {answer.status}: {await answer.text()}")


def _refusal(text: str) -> Unanswered:
    return Paused(text) if PAUSED in text else Unanswered(text)


def _body(question: Question, max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": question.prompt,
        "max_tokens": max_tokens,
        "n": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
