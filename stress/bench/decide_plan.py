"""What ``stress.bench decide`` asks for: tiers, prompts, clients; and the model's shape.

The model's keys and values are so small, and its layers so large, that a CPU computes some tens
of MB of them a second. So storage of 2 MB/s loses against computing, and that of 2 GB/s wins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import Misuse
from kvtier.plugin_api.sizes import parse_size
from stress.bench.rated_tier import Rate

if TYPE_CHECKING:
    import argparse

BLOCK_TOKENS: Final = 32
LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 2, 4, 1, 64, 512
#: keys and values of one block in float32; what one block of kvtier holds
BLOCK_BYTES: Final = 2 * LAYERS * KV_HEADS * HEAD_SIZE * BLOCK_TOKENS * 4
BATCH_TOKENS: Final = 2_048  #: that the engine computes in one step

LOAD, RECOMPUTE, AUTO = "load", "recompute", "auto"
POLICIES: Final = (LOAD, RECOMPUTE, AUTO)

HANG: Final = "hang"
TOKENS_MIN: Final = 4 * BLOCK_TOKENS
TOKENS_MAX: Final = 32_000
CLIENTS_MAX: Final = 64
WINDOW: Final = 5
"""Requests whose median tells whether a step was noticed: one on a busy machine tells nothing."""

PROMPTS_MIN: Final = 4
"""Of each length, so that a client does not ask for the same one each time."""


class Speed(NamedTuple):
    """How fast the tier is in some cells, as it was asked for."""

    name: str
    rate: Rate


class Cell(NamedTuple):
    """What is measured by itself."""

    speed: Speed
    tokens: int  #: in each prompt
    clients: int  #: that ask at once


class Plan(NamedTuple):
    """All that is measured."""

    speeds: tuple[Speed, ...]
    prompts: tuple[int, ...]
    clients: tuple[int, ...]
    repeats: int
    step_requests: int

    def cells(self) -> list[Cell]:
        """Return all cells. The tier never becomes faster: that is what the step is for."""
        return [
            Cell(speed, tokens, clients)
            for speed in self.speeds
            for tokens in self.prompts
            for clients in self.clients
        ]

    @property
    def prompts_stored(self) -> int:
        """How many prompts of each length there are."""
        return max(PROMPTS_MIN, *self.clients)

    @property
    def step_speeds(self) -> tuple[Speed, Speed] | None:
        """The fastest and the slowest tier, between which it steps; None: there are no two."""
        moving = [speed for speed in self.speeds if not speed.rate.hangs]
        return (moving[0], moving[-1]) if len(moving) > 1 else None

    @property
    def step_tokens(self) -> int:
        """The prompts of the step's traffic."""
        return sorted(self.prompts)[len(self.prompts) // 2]


def read_plan(asked: argparse.Namespace) -> Plan:
    """Read what the command was given. Raises ``Misuse``."""
    speeds = {speed.name: speed for speed in map(_speed, asked.rates.split(","))}
    if 0 < asked.step_requests < WINDOW:
        raise Misuse(f"--step-requests {asked.step_requests} must be at least {WINDOW}, or 0.")
    return Plan(
        tuple(sorted(speeds.values(), key=lambda speed: _slowness(speed.rate))),
        _numbers("--prompts", asked.prompts, TOKENS_MIN, TOKENS_MAX),
        _numbers("--clients", asked.clients, 1, CLIENTS_MAX),
        asked.repeats,
        asked.step_requests,
    )


def _speed(text: str) -> Speed:
    name = text.strip()
    if name == HANG:
        return Speed(name, Rate(hangs=True))
    bytes_per_s = parse_size(name.removesuffix("/s"))
    if not bytes_per_s:
        raise Misuse(
            f"--rates: {name!r} is no rate. Give bytes a second, such as 20MB,2GB, or {HANG}."
        )
    return Speed(f"{name.removesuffix('/s')}/s", Rate(bytes_per_s=float(bytes_per_s)))


def _slowness(rate: Rate) -> tuple[bool, float]:
    return rate.hangs, -rate.bytes_per_s


def _numbers(option: str, text: str, least: int, most: int) -> tuple[int, ...]:
    try:
        numbers = sorted({int(each.replace("_", "")) for each in text.split(",")})
    except ValueError:
        raise Misuse(f"{option} {text!r}: give whole numbers, separated by commas.") from None
    if not least <= numbers[0] <= numbers[-1] <= most:
        raise Misuse(f"{option} {text!r}: each must be between {least} and {most}.")
    return tuple(numbers)
