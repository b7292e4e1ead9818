"""What steps compute of prompts, from what vLLM offers and looks up."""

from __future__ import annotations

from collections import defaultdict

import pytest

from kvtier.core.messages import TokenPlace
from kvtier.vllm.scheduler.prefill_steps import REST, WINDOW, PrefillSteps, Prompt

pytestmark = pytest.mark.one_release

CHUNK = 16


class Engine:
    """Notes what is told. ``end_of``: twelve chunks of a prompt."""

    def __init__(self, *, offers_first: bool = False, is_decided_by: bool = True) -> None:
        self.told: list[tuple[int, int, float | None]] = []
        self.now = 100.0
        self.prompts: defaultdict[str, Prompt] = defaultdict(Prompt)
        self.steps = PrefillSteps(
            CHUNK,
            lambda *step: self.told.append(step),
            is_decided_by=is_decided_by,
            offers_first=offers_first,
        )
        self.keys = [bytes([number]) for number in range(12)]
        self.end_of = {key: CHUNK * (n + 1) for n, key in enumerate(self.keys)}

    def offer(self, first: int, end: int, request: str = "r") -> None:
        self.steps.on_offer(self.prompts[request], self.keys[first:end], self.end_of)

    def step(self, seconds: float = 1.0, others: int = 1) -> None:
        self.now += seconds
        self.steps.on_step_end(self.now, others)


def test_a_step_computes_what_it_offers_behind_what_the_gpu_had() -> None:
    engine = Engine()
    engine.step()
    assert engine.steps.looks_up(engine.prompts["r"], engine.keys[2], engine.end_of) == TokenPlace(
        32, CHUNK
    )
    engine.offer(0, 6)  # vLLM offers what the GPU had, too
    engine.step()
    engine.offer(6, 8)
    engine.step()
    assert engine.told == [(64, 96**2 - 32**2, 1.0), (32, 128**2 - 96**2, 1.0)]


def test_what_is_offered_before_a_step_begins_is_told_when_that_step_has_ended() -> None:
    """As vLLM 0.33 does: both releases then tell the same."""
    engine = Engine(offers_first=True)
    engine.steps.looks_up(engine.prompts["r"], engine.keys[0], engine.end_of)
    engine.offer(0, 4)
    engine.step()
    engine.offer(4, 12)
    engine.step(seconds=2.0)
    engine.step(seconds=3.0)
    assert engine.told[-2:] == [(64, 64**2, 2.0), (128, 192**2 - 64**2, 3.0)]


def test_what_was_loaded_was_not_computed() -> None:
    engine = Engine()
    engine.step()
    engine.steps.looks_up(engine.prompts["r"], engine.keys[0], engine.end_of)
    engine.steps.on_load(engine.prompts["r"], engine.keys[:5], engine.end_of)
    engine.steps.on_loaded(engine.prompts["r"])
    engine.offer(5, 8)
    engine.step()
    assert engine.told == [(48, 128**2 - 80**2, 1.0)]


def test_generated_tokens_are_no_part_of_a_prompt() -> None:
    engine = Engine()
    engine.step()
    engine.steps.looks_up(engine.prompts["r"], engine.keys[0], engine.end_of)
    engine.offer(0, 12)
    engine.step()
    engine.end_of[b"generated"] = 13 * CHUNK
    engine.keys.append(b"generated")
    for _ in range(9):
        engine.offer(12, 13)
        engine.step()
    assert [step[0] for step in engine.told] == [192, 0]


def test_of_a_request_that_looked_nothing_up_only_what_comes_later_counts() -> None:
    """How much of its first offer the GPU had is not known."""
    engine = Engine()
    engine.step()
    engine.offer(0, 8)
    engine.step()
    engine.offer(8, 12)
    engine.step()
    assert [step[0] for step in engine.told] == [64]


def test_a_preempted_request_computes_again() -> None:
    engine = Engine()
    engine.step()
    engine.steps.looks_up(engine.prompts["r"], engine.keys[0], engine.end_of)
    engine.offer(0, 8)
    engine.step()
    engine.steps.looks_up(engine.prompts["r"], engine.keys[0], engine.end_of)
    engine.offer(0, 4)
    engine.step()
    assert [step[0] for step in engine.told] == [128, 64]


def test_time_counts_only_while_something_is_computed() -> None:
    engine = Engine()
    engine.step()
    engine.steps.looks_up(engine.prompts["r"], engine.keys[0], engine.end_of)
    engine.offer(0, 8)
    engine.step(others=0)
    engine.offer(8, 12)
    engine.step(seconds=60.0)
    assert [step[2] for step in engine.told] == [1.0, None]


def test_time_counts_until_the_last_request_ends() -> None:
    engine = Engine()
    engine.step()
    engine.steps.looks_up(engine.prompts["r"], engine.keys[0], engine.end_of)
    engine.offer(0, 12)
    engine.now += 0.5
    engine.steps.on_loaded(engine.prompts.pop("r"))
    engine.steps.on_idle(engine.now, 0)
    engine.step(seconds=60.0)
    assert engine.told == [(192, 192**2, 0.5)]


def test_while_the_only_request_is_loaded_nothing_is_computed() -> None:
    engine = Engine()
    engine.steps.looks_up(engine.prompts["r"], engine.keys[0], engine.end_of)
    engine.steps.on_load(engine.prompts["r"], engine.keys[:5], engine.end_of)
    engine.step()
    engine.steps.on_loaded(engine.prompts["r"])
    engine.offer(5, 8)
    engine.step()
    assert [step[2] for step in engine.told] == [None]


def test_where_nothing_is_decided_by_it_a_few_steps_are_reported_then_none_for_a_while() -> None:
    """The first after a rest has no time: what went before it was not watched."""
    engine = Engine(is_decided_by=False)
    for number in range(3 * (WINDOW + REST - 1)):
        request = str(number)
        engine.steps.looks_up(engine.prompts[request], engine.keys[0], engine.end_of)
        engine.steps.on_scheduled()
        engine.offer(0, 4, request)
        if engine.steps.is_awake:
            engine.step()
        else:
            engine.now += 1
    told = [(64, 64**2, None), *[(64, 64**2, 1.0)] * (WINDOW - 1)]
    assert engine.told == told * 3
