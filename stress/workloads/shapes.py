"""The shapes: who comes when, and which blocks their prompts share.

A request is its time in seconds, and the ids of its blocks of ``BLOCK_TOKENS`` tokens. All is
drawn from the dice that each shape is given, so a seed gives the same trace everywhere.
"""

from __future__ import annotations

import math
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping

BLOCK_TOKENS: Final = 512

Request = tuple[float, list[int]]


class Shape(NamedTuple):
    """One shape."""

    what: str
    requests: Callable[[random.Random], Iterator[Request]]


class _Blocks:
    """Blocks that nobody has used before."""

    def __init__(self) -> None:
        self._ids = count()

    def new(self, number: int) -> list[int]:
        """Return so many."""
        return [next(self._ids) for _ in range(number)]


def _about(dice: random.Random, median: float, spread: float) -> float:
    """Draw a length or a gap: log-normal."""
    return median * math.exp(dice.gauss(0.0, spread))


def _some(dice: random.Random, median: float, spread: float) -> int:
    return max(1, int(_about(dice, median, spread)))


def _arrivals(dice: random.Random, a_second: float, seconds: float) -> Iterator[float]:
    at_s = dice.expovariate(a_second)
    while at_s < seconds:
        yield at_s
        at_s += dice.expovariate(a_second)


def coding(dice: random.Random) -> Iterator[Request]:
    """Coding sessions: steps within seconds, a person who thinks, agents of the agent."""
    blocks = _Blocks()
    systems = [blocks.new(30) for _ in range(3)]
    for began_s in _arrivals(dice, 0.03, 1800.0):
        at_s, context = began_s, dice.choice(systems) + blocks.new(dice.randint(5, 40))
        for _turn in range(1 + int(dice.expovariate(1 / 4))):
            for _step in range(1 + int(dice.expovariate(1 / 10))):
                yield at_s, context + blocks.new(1)
                context = context + blocks.new(_some(dice, 3, 1.0))
                at_s += _about(dice, 6.0, 0.9)
                if dice.random() < 0.04:
                    errand = dice.choice(systems) + blocks.new(10)
                    for _ in range(dice.randint(3, 12)):
                        yield at_s, errand + blocks.new(1)
                        errand = errand + blocks.new(dice.randint(1, 8))
                        at_s += _about(dice, 4.0, 0.7)
                if len(context) > 900:  # it is summed up
                    context = context[:40] + blocks.new(30)
            at_s += _about(dice, 60.0, 1.1)


def agents(dice: random.Random) -> Iterator[Request]:
    """Agents: tool calls of seconds, up to 60 steps, twelve system prompts."""
    blocks = _Blocks()
    systems = [blocks.new(dice.randint(3, 12)) for _ in range(12)]
    for began_s in _arrivals(dice, 0.25, 3000.0):
        at_s, context = began_s, dice.choice(systems) + blocks.new(dice.randint(1, 6))
        for _step in range(min(60, 1 + int(_about(dice, 8, 0.9)))):
            yield at_s, context + blocks.new(1)
            context = context + blocks.new(_some(dice, 2, 0.8))
            at_s += _about(dice, 5.0, 1.0)


def chats(dice: random.Random) -> Iterator[Request]:
    """Chats over one system prompt: turns within minutes, and most don't return."""
    blocks = _Blocks()
    system = blocks.new(2)
    for began_s in _arrivals(dice, 1.2, 3600.0):
        at_s, goes_on = began_s, 0.45
        context = system + blocks.new(_some(dice, 5, 1.2))
        while True:
            yield at_s, context + blocks.new(1)
            if dice.random() > goes_on:
                break
            goes_on = min(0.85, goes_on + 0.1)
            context = context + blocks.new(_some(dice, 2, 1.0))
            at_s += _about(dice, 100.0, 0.9)


def documents(dice: random.Random) -> Iterator[Request]:
    """Questions about documents: some of them many, half of all prompts short and alone."""
    blocks = _Blocks()
    for began_s in _arrivals(dice, 1.5, 1500.0):
        document, at_s = blocks.new(_some(dice, 30, 1.0)), began_s
        if dice.random() < 0.5:
            yield at_s, document[:1]
            continue
        gap_s = _about(dice, 60.0, 0.7)
        for _question in range(min(30, int(dice.paretovariate(1.1)))):
            yield at_s, document + blocks.new(dice.randint(1, 3))
            at_s += dice.expovariate(1 / gap_s)


def pairs(dice: random.Random) -> Iterator[Request]:
    """Retrieval: two of 600 documents behind one head, popular ones more often."""
    blocks = _Blocks()
    head = blocks.new(3)
    lengths = [dice.randint(4, 30) for _ in range(600)]
    first = [blocks.new(length) for length in lengths]
    second: dict[tuple[int, int], list[int]] = {}
    for at_s in _arrivals(dice, 4.0, 1200.0):
        pair = (_popular(dice, 600), _popular(dice, 600))
        if pair not in second:
            second[pair] = blocks.new(lengths[pair[1]])
        yield at_s, head + first[pair[0]] + second[pair] + blocks.new(1)


def _popular(dice: random.Random, number: int) -> int:
    return min(number - 1, int(number * dice.random() ** 3))


def scans(dice: random.Random) -> Iterator[Request]:
    """Chats, and a third of the requests long documents that are read once."""
    blocks = _Blocks()
    for began_s in _arrivals(dice, 0.8, 3000.0):
        if dice.random() < 0.35:
            yield began_s, blocks.new(_some(dice, 60, 0.5))
            continue
        at_s, context = began_s, blocks.new(_some(dice, 6, 0.8))
        while True:
            yield at_s, context + blocks.new(1)
            if dice.random() > 0.75:
                break
            context = context + blocks.new(_some(dice, 2, 1.0))
            at_s += _about(dice, 60.0, 0.8)


def moving(dice: random.Random) -> Iterator[Request]:
    """Forty popular documents, which are others every 200 seconds."""
    blocks = _Blocks()
    popular: list[list[int]] = []
    ends_s = 0.0
    for at_s in _arrivals(dice, 3.0, 2400.0):
        if at_s >= ends_s:
            popular = [blocks.new(dice.randint(5, 40)) for _ in range(40)]
            ends_s += 200.0
        yield at_s, dice.choice(popular) + blocks.new(dice.randint(1, 4))


def periodic(dice: random.Random) -> Iterator[Request]:
    """Eighty jobs that run every 20 to 300 seconds, among prompts that come once."""
    blocks = _Blocks()
    for _job in range(80):
        every_s = dice.choice((20, 60, 120, 300))
        at_s, prompt = dice.random() * every_s, blocks.new(dice.randint(10, 60))
        while at_s < 3000.0:
            yield at_s, prompt + blocks.new(dice.randint(1, 3))
            at_s += every_s * dice.uniform(0.95, 1.05)
    for _once in range(2000):
        yield dice.random() * 3000.0, blocks.new(dice.randint(5, 40))


def swarm(dice: random.Random) -> Iterator[Request]:
    """A swarm: few requests, of agents that leave three contexts of thousands of blocks midway."""
    blocks = _Blocks()
    contexts = [blocks.new(dice.randint(1500, 3000)) for _ in range(3)]
    for began_s in _arrivals(dice, 0.1, 400.0):
        shared = dice.choice(contexts)
        at_s, left_at = began_s, dice.randint(len(shared) // 2, len(shared))
        context = shared[:left_at] + blocks.new(dice.randint(1, 20))
        for _step in range(1 + int(dice.expovariate(1 / 8))):
            yield at_s, context + blocks.new(1)
            context = context + blocks.new(_some(dice, 3, 1.0))
            at_s += _about(dice, 6.0, 0.9)


SHAPES: Final[Mapping[str, Shape]] = {
    each.__name__: Shape((each.__doc__ or "").rstrip("."), each)
    for each in (agents, chats, coding, documents, moving, pairs, periodic, scans, swarm)
}
