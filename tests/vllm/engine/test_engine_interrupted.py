"""Requests that are aborted, preempted or reset at the worst moments.

Each scenario holds a promotion, a load or a store under way on purpose, does
the worst, and asks for two things: the same tokens, and everything at rest.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from anyio import to_thread

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import Engine, engine, kvtier_config
from tests.vllm.support.play import (
    Steps,
    Transfers,
    assert_at_rest,
    grown,
    hold_transfers,
    play_round,
    prompts_of,
    whole_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LENGTHS = [900, 700, 640, 333]  #: in tokens
MEMORY_TIER = {"type": "memory", "capacity_bytes": 32 << 20}
MEMORY_HITS = 'vllm:kv_offload_tiering_chunk_hits{tier="1:memory"}'
LOADED = "vllm:kv_offload_load_bytes"
PREEMPTIONS = "vllm:num_preemptions"
HELD_STEPS = 3
STRANGE_SEED = 5000


def is_storing(now: dict[str, Any]) -> bool:
    return bool(now["primary"]["filling_from_gpu_slots"])


def is_promoting(now: dict[str, Any]) -> bool:
    return bool(now["tiers"][0]["promotion_jobs_in_flight"])


def is_loading(now: dict[str, Any]) -> bool:
    return bool(now["primary"]["pinned_slots"])


def is_cascading(now: dict[str, Any]) -> bool:
    return bool(now["tiers"][0]["cascade_slots"])


class Worst:
    """An engine whose transfers and tier hold still on demand."""

    def __init__(self, running: Engine, transfers: Transfers) -> None:
        self.running = running
        self.steps = Steps(running)
        self.transfers = transfers
        facade = running.manager().facade
        self.facade = facade
        self.seen: dict[str, dict[str, Any]] = {}
        self._go_on = threading.Event()
        self._go_on.set()
        backend = facade._tiers[0]._backend
        for name in ("load", "store"):
            setattr(backend, name, self._held(getattr(backend, name)))

    def hold_tier(self) -> None:
        """Let each load and store of the tier wait until ``release``."""
        self._go_on.clear()

    def release(self) -> None:
        """Let the tier go on."""
        self._go_on.set()

    def _held(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def held(blocks: Any) -> Any:
            await to_thread.run_sync(self._go_on.wait)
            return await call(blocks)

        return held

    def drop_memory(self) -> None:
        """Empty both caches in front of the tier."""
        self.running.forget()
        self.facade.reset()
        self.facade.on_reset_flushed()

    def rest(self, name: str) -> None:
        """Note the statistics at rest."""
        self.release()
        self.seen[name] = self.running.settle()


def aborts(model: str, lengths: list[int]) -> dict[str, Any]:
    transfers = hold_transfers()
    prompts = prompts_of(lengths)
    with engine(model, kvtier_config(secondary_tiers=[MEMORY_TIER], on_reset="keep")) as running:
        worst = Worst(running, transfers)
        steps = worst.steps

        strange = prompts_of(lengths, seed=STRANGE_SEED)  # no tier has it yet
        with transfers.holding():
            steps.add("stores", strange[0], 50)
            steps.until(is_storing)
            steps.abort("stores")
            for _ in range(HELD_STEPS):
                steps.step()
        worst.rest("stores")

        worst.hold_tier()
        steps.add("cascades", strange[1], 50)
        steps.until(is_cascading)
        steps.abort("cascades")
        worst.rest("cascades")

        cold = play_round(running, prompts)

        worst.drop_memory()
        worst.hold_tier()
        for number, prompt in enumerate(prompts):
            steps.add(f"promotion {number}", prompt)
        steps.until(is_promoting)
        steps.abort("promotion 0", "promotion 2")
        worst.release()
        steps.finish()
        worst.rest("promotions")

        running.forget()
        with transfers.holding():
            for number, prompt in enumerate(prompts[:2]):
                steps.add(f"load {number}", prompt)
            steps.until(is_loading)
            steps.abort("load 0")
            for _ in range(HELD_STEPS):
                steps.step()
            worst.seen["loads held"] = running.statistics()
        steps.finish()
        worst.rest("loads")

        return {
            "cold": cold,
            "again": play_round(running, prompts),
            "seen": worst.seen,
            "tokens": steps.tokens,
            "cached": steps.cached,
        }


def test_aborts_while_blocks_move(llama: Path, log_folder: Path) -> None:
    """Nothing stays pinned, leased or in flight for a request that is gone."""
    told = run_scenario(aborts, log_folder=log_folder, model=str(llama), lengths=LENGTHS)
    for name in ("stores", "cascades", "promotions", "loads"):
        assert_at_rest(told["seen"][name])
    assert told["seen"]["loads held"]["primary"]["pinned_slots"] > 0
    cold, again = told["cold"], told["again"]
    assert cold["cached"] == [0] * len(LENGTHS)
    for name, number in (("promotion 1", 1), ("promotion 3", 3), ("load 1", 1)):
        assert told["tokens"][name] == cold["tokens"][number]
        assert told["cached"][name] == whole_blocks(LENGTHS)[number]
    assert set(told["tokens"]) == {"promotion 1", "promotion 3", "load 1"}
    assert again["tokens"] == cold["tokens"]
    assert again["cached"] == whole_blocks(LENGTHS)
    assert again["metrics"][MEMORY_HITS] > 0
    assert_at_rest(again["statistics"])


def resets(model: str, lengths: list[int]) -> dict[str, Any]:
    transfers = hold_transfers()
    prompts = {  # fresh ones where something is to be stored
        name: prompts_of(lengths, seed=STRANGE_SEED * number)
        for number, name in enumerate(("promotions", "loads", "stores", "cascades"))
    }
    prompts["loads"] = prompts["promotions"]
    told: dict[str, Any] = {}
    with engine(model, None, blocks=120) as alone:
        told["reference"] = {
            name: alone.run_one_by_one(each, 20).tokens for name, each in prompts.items()
        }
    with engine(
        model, kvtier_config(secondary_tiers=[MEMORY_TIER], on_reset="keep"), blocks=120
    ) as running:
        worst = Worst(running, transfers)
        steps = worst.steps
        told["cold"] = play_round(running, prompts["loads"], 20)

        def begin(name: str) -> None:
            for number, prompt in enumerate(prompts[name]):
                steps.add(f"{name} {number}", prompt, 20)

        # Everything running is thrown back, while its stores are under way.
        with transfers.holding():
            begin("stores")
            steps.until(is_storing)
            assert running.llm.reset_prefix_cache(True, True)
            for _ in range(HELD_STEPS):
                steps.step()
        steps.finish()
        worst.rest("stores")

        # The same while cascades are under way.
        worst.hold_tier()
        begin("cascades")
        steps.until(is_cascading)
        assert running.llm.reset_prefix_cache(True, True)
        worst.release()
        steps.finish()
        worst.rest("cascades")

        # While promotions are: requests that wait for them hold no GPU blocks yet.
        worst.drop_memory()
        worst.hold_tier()
        begin("promotions")
        steps.until(is_promoting)
        assert running.llm.reset_prefix_cache(True, True)
        told["quarantined"] = running.statistics()["primary"]["quarantined_slots"]
        worst.release()
        steps.finish()
        worst.rest("promotions")

        # While the GPU reads: vLLM can only reset the connector then.
        play_round(running, prompts["loads"], 20)
        running.forget()
        with transfers.holding():
            begin("loads")
            steps.until(is_loading)
            assert not running.llm.reset_prefix_cache(False, True)
            told["quarantined by loads"] = running.statistics()["primary"]["quarantined_slots"]
            for _ in range(HELD_STEPS):
                steps.step()
        steps.finish()
        worst.rest("loads")

        told["again"] = play_round(running, prompts["loads"], 20)
        told |= {"seen": worst.seen, "tokens": steps.tokens, "cached": steps.cached}
    return told


@pytest.mark.one_release
def test_resets_in_the_middle_of_running_requests(llama: Path, log_folder: Path) -> None:
    """Promise 7: a reset waits for nobody, and old jobs end into quarantine."""
    told = run_scenario(resets, log_folder=log_folder, model=str(llama), lengths=LENGTHS)
    cold = told["cold"]
    assert cold["cached"] == [0] * len(LENGTHS)
    assert told["quarantined"] > 0
    assert told["quarantined by loads"] > 0
    for name in ("stores", "cascades", "promotions", "loads"):
        assert_at_rest(told["seen"][name])
        for number in range(len(LENGTHS)):
            tokens = told["tokens"][f"{name} {number}"]
            assert tokens == told["reference"][name][number], (name, number)
    assert cold["tokens"] == told["reference"]["loads"]
    assert told["again"]["tokens"] == cold["tokens"]
    assert told["again"]["cached"] == whole_blocks(LENGTHS)
    assert_at_rest(told["again"]["statistics"])


def preemptions(model: str, lengths: list[int], max_tokens: int, blocks: int) -> dict[str, Any]:
    prompts = prompts_of(lengths)
    with engine(model, None, blocks=200) as alone:
        reference = alone.run_one_by_one(prompts, max_tokens)
    told: dict[str, Any] = {"reference": reference.as_json(), "rounds": []}
    config = kvtier_config(
        secondary_tiers=[MEMORY_TIER], on_reset="keep", offload_prompt_only=False
    )
    with engine(model, config, blocks=blocks, max_model_len=480) as running:
        told["block_bytes"] = running.manager()._memory.block_bytes
        for _ in range(2):
            running.forget()
            together = running.run(prompts, max_tokens)
            told["rounds"].append(
                {
                    **together.as_json(),
                    "statistics": running.settle(),
                    "metrics": running.metrics(),
                }
            )
    return told


def test_preempted_requests_go_on_from_memory(llama: Path, log_folder: Path) -> None:
    """A GPU cache too small for what runs: requests lose their blocks halfway."""
    lengths = [300, 310, 320, 330, 340, 350]
    told = run_scenario(
        preemptions,
        log_folder=log_folder,
        model=str(llama),
        lengths=lengths,
        max_tokens=100,
        blocks=40,
    )
    rounds = told["rounds"]
    for number, each in enumerate(rounds):
        assert each["tokens"] == told["reference"]["tokens"]
        assert grown(rounds, number, PREEMPTIONS) > 0
        assert_at_rest(each["statistics"])
    assert rounds[0]["cached"] == [0] * len(lengths)
    assert grown(rounds, 0, LOADED) > 0  # the GPU had lost blocks of what was preempted
    assert rounds[1]["cached"] == whole_blocks(lengths)
    assert grown(rounds, 1, LOADED) >= sum(whole_blocks(lengths)) // 32 * told["block_bytes"]


def pauses(model: str, prompt: list[int]) -> dict[str, Any]:
    """Pause with ``mode="keep"`` while the GPU reads: as a trainer does that has new weights."""
    transfers = hold_transfers()
    told: dict[str, Any] = {"raised": []}
    with engine(model, kvtier_config(secondary_tiers=[MEMORY_TIER])) as running:
        steps, core = Steps(running), running.core()

        def pause() -> None:
            try:
                core.pause_scheduler("keep", True)
                told["raised"].append("")
            except RuntimeError as error:
                told["raised"].append(str(error))

        told["cold"] = play_round(running, [prompt])
        running.forget()
        generation = running.manager().facade._generations.mark
        with transfers.holding():
            steps.add("load", prompt)
            steps.until(is_loading)
            pause()
        for _ in range(HELD_STEPS):  # the load ends, and its request keeps what it has
            steps.step()
        pause()
        told["was reset"] = running.manager().facade._generations.mark != generation
        core.resume_scheduler()
        steps.finish()
        pause()
        told["is reset"] = running.manager().facade._generations.mark != generation
        core.resume_scheduler()
        told |= {"again": play_round(running, [prompt]), "tokens": steps.tokens}
    return told


@pytest.mark.long
def test_a_pause_that_keeps_requests_fails_during_a_load_and_is_right_after_it(
    llama: Path, log_folder: Path
) -> None:
    """As ``change-weights.md`` says. vLLM alone throws back what it has computed, and no load."""
    (prompt,) = prompts_of(LENGTHS[:1])
    told = run_scenario(pauses, log_folder=log_folder, model=str(llama), prompt=prompt)
    *failed, succeeded = told["raised"]
    assert len(failed) == 2
    for text in failed:
        assert "presence of running requests waiting for remote KV transfer" in text
    assert succeeded == ""
    assert (told["was reset"], told["is reset"]) == (False, True)
    assert told["tokens"]["load"] == told["cold"]["tokens"][0] == told["again"]["tokens"][0]
    assert_at_rest(told["again"]["statistics"])
