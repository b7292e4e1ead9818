"""The prompts of a server's soak, which share prefixes, and the right answers to them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stress.engine.answers import Reference

VOCABULARY = 512
DOCUMENTS = 10
CUTS_TOKENS = (64, 160, 260, 400)  #: of a document, in a prompt
QUESTIONS_TOKENS = (5, 40)
OF_ONE_DOCUMENT = len(CUTS_TOKENS) * len(QUESTIONS_TOKENS)  #: so many questions


@dataclass
class Question:
    """A prompt, and the right answers to it."""

    prompt: list[int]
    answers: dict[str, Reference] = field(default_factory=dict)  #: weights → answer


def make_questions(seed: int, count: int = DOCUMENTS) -> list[Question]:
    """Return prompts that begin with parts of ``count`` documents, and end differently."""
    dice = random.Random(seed)

    def text(tokens: int) -> list[int]:
        return [dice.randrange(3, VOCABULARY) for _ in range(tokens)]

    documents = [text(max(CUTS_TOKENS)) for _ in range(count)]
    endings = [text(tokens) for tokens in QUESTIONS_TOKENS]
    return [
        Question(document[:cut] + ending)
        for document in documents
        for cut in CUTS_TOKENS
        for ending in endings
    ]
