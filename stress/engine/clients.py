"""Clients of a vLLM HTTP server that share prefixes, leave midway, and check every token.

Tokens are compared with those that a server without offloading gave. Answers
are greedy, so equal KV gives equal tokens, but for one thing: the sums of
float32 depend on what else is in the batch, by some units in the last place.
They can decide between two tokens that are as good as equal. Such a tie is
recognised by the reference's own figures: its two best tokens lie closer than
``TIE_LOGPROB``, and the answer took the other one. What follows a tie is not
compared. KV of another prompt, or of none, changes logits by whole units.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stress.engine.vllm_server import Server

VOCABULARY = 512
DOCUMENTS = 10
CUTS_TOKENS = (96, 260, 448, 700)  #: of a document, in a prompt
QUESTIONS_TOKENS = (5, 80)
OUTPUT_TOKENS_MAX = 160  #: running requests grow, and so push each other out
CHOICES_MAX = 3
LEAVES_AFTER_S_MAX = 8.0
TIE_LOGPROB = 1e-3
REFERENCES_AT_ONCE = 8


@dataclass
class Question:
    """A prompt, and what a server without offloading answers."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    ties: dict[int, int] = field(default_factory=dict)
    """Position → the token that is as good as the reference's own."""


def make_questions(seed: int) -> list[Question]:
    """Return prompts that begin with parts of few documents, and end differently."""
    dice = random.Random(seed)

    def text(tokens: int) -> list[int]:
        return [dice.randrange(3, VOCABULARY) for _ in range(tokens)]

    documents = [text(max(CUTS_TOKENS)) for _ in range(DOCUMENTS)]
    endings = [text(tokens) for tokens in QUESTIONS_TOKENS]
    return [
        Question(document[:cut] + ending)
        for document in documents
        for cut in CUTS_TOKENS
        for ending in endings
    ]


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
    question.tokens = choice["token_ids"]
    question.ties = {
        position: tie
        for position, best in enumerate(choice["logprobs"]["top_logprobs"])
        if (tie := _tie(best, question.tokens[position])) is not None
    }


def _tie(best: dict[str, float], token: int) -> int | None:
    """Return the other token that is as good as ``token``, if there is one."""
    figures = {int(name.removeprefix("token_id:")): value for name, value in best.items()}
    own = figures.pop(token)
    return next((other for other, value in figures.items() if own - value < TIE_LOGPROB), None)


class Clients:
    """Some clients at once, until they are told to stop."""

    def __init__(self, server: Server, questions: Sequence[Question], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._server = server
        self._questions = questions
        self._seed = seed
        self._stop = asyncio.Event()

    async def run(self, count: int) -> None:
        """Ask until ``stop``, and end what is under way. Raises ``Failure``."""
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(self._client(random.Random(f"{self._seed}:{number}")))

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
            try:
                await behave(dice)
            except aiohttp.ClientError as error:
                self._server.assert_alive()
                raise Failure(f"{name}: {error!r}") from error
            self.counts[name] += 1

    # --- what a client does with one request ---

    async def _read_whole(self, dice: random.Random) -> None:
        question, body = self._ask(dice)
        async with self._server.session.post(self._url(), json=body) as answer:
            if answer.status != 200:
                raise Failure(f"status {answer.status}: {await answer.text()}")
            choices = (await answer.json())["choices"]
        for choice in choices:
            self._check_end(choice["finish_reason"])
            self._check(question, choice["token_ids"], body["max_tokens"])
        if len(choices) != body["n"]:
            raise Failure(f"{len(choices)} choices, not {body['n']}")

    async def _stream_whole(self, dice: random.Random) -> None:
        await self._stream(dice, chunks_max=None)

    async def _leave_in_stream(self, dice: random.Random) -> None:
        await self._stream(dice, chunks_max=dice.randrange(OUTPUT_TOKENS_MAX))

    async def _leave_unread(self, dice: random.Random) -> None:
        """Leave before the answer, mostly: while it waits, is promoted, loaded or computed."""
        _, body = self._ask(dice)
        leaves_after_s = dice.choice([0.02, 0.2, 1.0]) * dice.uniform(0, LEAVES_AFTER_S_MAX)
        try:
            async with asyncio.timeout(leaves_after_s):
                async with self._server.session.post(self._url(), json=body) as answer:
                    if answer.status != 200:
                        raise Failure(f"status {answer.status}: {await answer.text()}")
                    await answer.read()
        except TimeoutError:
            self.counts["left_unread"] += 1

    async def _stream(self, dice: random.Random, chunks_max: int | None) -> None:
        question, body = self._ask(dice)
        tokens: dict[int, list[int]] = {number: [] for number in range(body["n"])}
        ended: set[int] = set()
        chunks = 0
        async with self._server.session.post(self._url(), json=body | {"stream": True}) as answer:
            if answer.status != 200:
                raise Failure(f"status {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if chunks == chunks_max:
                    break
                text = line.decode().strip().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                chunks += 1
                chunk = json.loads(text)
                if "choices" not in chunk:
                    raise Failure(f"in a stream: {text}")
                for choice in chunk["choices"]:
                    tokens[choice["index"]] += choice["token_ids"] or []
                    if choice["finish_reason"] is not None:
                        self._check_end(choice["finish_reason"])
                        ended.add(choice["index"])
        if chunks_max is None and ended != set(tokens):
            raise Failure(f"a stream of {body['n']} choices ended with {sorted(ended)} complete")
        for number, each in tokens.items():
            self._check(question, each, body["max_tokens"] if number in ended else len(each))

    def _ask(self, dice: random.Random) -> tuple[Question, dict[str, Any]]:
        question = dice.choice(self._questions)
        body = _body(question, dice.randrange(1, OUTPUT_TOKENS_MAX + 1))
        if dice.random() < 0.2:
            # Greedy as well, in vLLM's sampler: it wants a temperature for several choices.
            body |= {"n": dice.randrange(2, CHOICES_MAX + 1), "temperature": 1.0, "top_k": 1}
        return question, body

    def _url(self) -> str:
        return f"{self._server.url}/v1/completions"

    # --- what must be true of every answer ---

    def _check_end(self, reason: str) -> None:
        if reason != "length":
            raise Failure(f"an answer ended with {reason!r}, not 'length'")

    def _check(self, question: Question, tokens: list[int], expected: int) -> None:
        if len(tokens) != expected:
            raise Failure(f"{len(tokens)} tokens, not {expected}")
        for position, token in enumerate(tokens):
            if token == question.tokens[position]:
                self.counts["tokens"] += 1
            elif token == question.ties.get(position):
                self.counts["ties"] += 1
                return
            else:
                prompt = self._questions.index(question)
                raise Failure(
                    f"prompt {prompt} of {len(question.prompt)} tokens: output token {position}"
                    f" is {token}, and {question.tokens[position]} without offloading"
                )


def _body(question: Question, max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": question.prompt,
        "max_tokens": max_tokens,
        "n": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
