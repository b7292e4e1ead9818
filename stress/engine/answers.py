"""Answers of a server, compared with those that one without offloading gave.

Answers are greedy, so equal KV gives equal tokens, but for one thing: the sums of
float32 depend on what else is in the batch, by some units in the last place.
They can decide between two tokens that are as good as equal. Such a tie is
recognised by the reference's own figures: its two best tokens lie closer than
``TIE_LOGPROB``, and the answer took the other one. What follows a tie is not
compared. KV of another prompt, of other weights, or of none, changes logits by whole units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

TIE_LOGPROB = 1e-3


@dataclass(frozen=True)
class Reference:
    """What a server without offloading answers."""

    tokens: list[int]
    ties: dict[int, int]
    """Position → the token that is as good as the reference's own."""


def reference_of(choice: Mapping[str, Any]) -> Reference:
    """Return what a server answered that was asked for its two best tokens at each position."""
    tokens = choice["token_ids"]
    ties = {
        position: tie
        for position, best in enumerate(choice["logprobs"]["top_logprobs"])
        if (tie := _tie(best, tokens[position])) is not None
    }
    return Reference(tokens, ties)


@dataclass(frozen=True)
class Difference:
    """How an answer differs from a reference."""

    same: int  #: tokens before the first that differs
    is_tie: bool = False
    text: str = ""  #: if it is wrong: how

    @property
    def is_right(self) -> bool:
        """Tell whether the answer could have been the reference's own."""
        return not self.text


def compare(right: Reference, tokens: list[int]) -> Difference:
    """Compare an answer, which may be shorter, with a reference."""
    for position, token in enumerate(tokens):
        if token == right.tokens[position]:
            continue
        if token == right.ties.get(position):
            return Difference(position, is_tie=True)
        expected = right.tokens[position]
        return Difference(position, text=f"output token {position} is {token}, and {expected}")
    return Difference(len(tokens))


def _tie(best: dict[str, float], token: int) -> int | None:
    """Return the other token that is as good as ``token``, if there is one."""
    figures = {int(name.removeprefix("token_id:")): value for name, value in best.items()}
    own = figures.pop(token)
    return next((other for other, value in figures.items() if own - value < TIE_LOGPROB), None)
