"""The ``disk`` tier inside vLLM's own tiering, in real engines: one entry of a list changed.

vLLM has no worker for the CPU platform; kvtier's does the copies between the engine's
tensors and vLLM's own region. Manager, primary tier and region are vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.patience import looks
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import PATIENT, Engine, engine, greedy, vllms_config
from tests.vllm.support.play import prompts_of, whole_blocks
from tests.vllm.support.weights import write_into

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [500, 1000, 333, 31]  #: in tokens; the last one is shorter than a block
OTHER_LENGTHS = [1000] * 3  #: of prompts that take the place of these in the primary tier
STREAMED = [200, 150, 90, 300]  #: parts of a prompt that a client streams
ANSWER_TOKENS = 40
BLOCK_BYTES = 4 * 2 * 32 * 2 * 32 * 4
PRIMARY_BLOCKS = 80  #: twice the longest prompt: more would not be stored
READ = 'vllm:kv_offload_tiering_read_bytes{tier="1:disk"}'
WRITTEN = 'vllm:kv_offload_tiering_write_bytes{tier="1:disk"}'
DAMAGED = 'kvtier:tier_damaged{tier="1:disk"}'
CLOSED = 'kvtier:tier_breaker_state{tier="1:disk",work="loads"}'


def config_of(path: str) -> dict[str, Any]:
    tier = {"type": "disk", "path": path, "capacity_bytes": 64 << 20, **PATIENT}
    return vllms_config(PRIMARY_BLOCKS * BLOCK_BYTES, tier)


def played(running: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    """Run prompts with an empty prefix cache of the engine's own, until no job is left.

    Each when the one before is stored: vLLM stores nothing of what has no room just then.
    """
    running.forget()
    tokens, cached = [], []
    for prompt in prompts:
        result = running.run([prompt])
        tokens += result.tokens
        cached += result.cached
        running.idle()
    running.run([[3]], max_tokens=1)  # publishes the counters
    running.idle()
    return {"tokens": tokens, "cached": cached, "metrics": running.metrics()}


def stream(running: Engine, parts: list[list[int]]) -> list[int]:
    """Send one part after the other, each once the last was answered; return the whole prompt.

    That is all parts, and the answers between them: vLLM drops the last token of each. The calls
    are those of ``AsyncLLM.generate`` for an asynchronous generator of prompts.
    """
    from vllm.v1.request import Request, RequestStatus

    core = running.core()

    def send(tokens: list[int], *, is_last: bool) -> None:
        core.add_request(
            Request(
                "streamed",
                tokens,
                greedy(ANSWER_TOKENS),
                None,
                block_hasher=core.request_block_hasher,
                resumable=not is_last,
            )
        )

    for part in parts:
        send([*part], is_last=False)
        session = core.scheduler.requests["streamed"]
        for _ in looks(lambda: session.status):  # noqa: B023 - called in this round
            if session.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
                break
            running.step()
    prompt: list[int] = list(session.prompt_token_ids)
    send([0], is_last=True)
    running.idle()
    return prompt


def first_engine(model: str, path: str) -> dict[str, Any]:
    with engine(model, config_of(path)) as running:
        cold = played(running, prompts_of(LENGTHS))
        played(running, prompts_of(OTHER_LENGTHS, seed=1000))
        warm = played(running, prompts_of(LENGTHS))
        streamed = stream(running, prompts_of(STREAMED, seed=2000))
        again = played(running, [streamed])
        return {"cold": cold, "warm": warm, "prompt": streamed, "streamed": again}


def second_engine(model: str, path: str) -> dict[str, Any]:
    """Find what the first one has stored; then have its weights changed, and nobody told."""
    with engine(model, config_of(path)) as running:
        played(running, prompts_of([100], seed=3000))
        told = {"again": played(running, prompts_of(LENGTHS))}
        write_into(running.core().model_executor.driver_worker.get_model())
        told["written"] = played(running, prompts_of(LENGTHS))
        return told


def computed(model: str, prompt: list[int]) -> dict[str, Any]:
    """Return what an engine without offloading answers: with other weights, in the end."""
    with engine(model, None) as running:
        told = {"plain": running.run_one_by_one([*prompts_of(LENGTHS), prompt]).tokens}
        write_into(running.core().model_executor.driver_worker.get_model())
        running.forget()
        return {**told, "plain, written": running.run_one_by_one(prompts_of(LENGTHS)).tokens}


@pytest.fixture(scope="module")
def story(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Have two engines play, one after the other, and one without any tier."""
    folder = tmp_path_factory.mktemp("only-disk")
    common: dict[str, Any] = {"log_folder": folder / "logs", "model": str(llama)}
    told: dict[str, Any] = {}
    for scenario in (first_engine, second_engine):
        told |= run_scenario(scenario, **common, path=str(folder / "kv"))
    return {**told, **run_scenario(computed, **common, prompt=told["prompt"])}


def test_hits_from_the_disk_give_the_tokens_of_a_recomputation(story: dict[str, Any]) -> None:
    cold, warm = story["cold"], story["warm"]
    assert cold["tokens"] == warm["tokens"] == story["plain"][:-1]
    assert cold["cached"] == [0] * len(LENGTHS)
    assert warm["cached"] == whole_blocks(LENGTHS)
    assert cold["metrics"][WRITTEN] == sum(whole_blocks(LENGTHS)) // 32 * BLOCK_BYTES
    assert warm["metrics"][READ] > 0
    assert warm["metrics"].get(DAMAGED, 0) == 0
    assert warm["metrics"][CLOSED] == 0


def test_what_was_computed_for_a_streamed_prompt_is_found_as_its_own(story: dict[str, Any]) -> None:
    """vLLM 0.32 stored other blocks under the keys of all that followed the first part."""
    length = sum(STREAMED) + (len(STREAMED) - 1) * (ANSWER_TOKENS - 1)
    assert len(story["prompt"]) == length
    assert story["streamed"]["cached"] == whole_blocks([length])
    assert story["streamed"]["tokens"] == story["plain"][-1:]


def test_an_engine_that_starts_again_finds_what_was_stored(story: dict[str, Any]) -> None:
    """Facts about the model are found without kvtier's own spec: else nothing would be shared."""
    again = story["again"]
    assert again["tokens"] == story["plain"][:-1]
    assert again["cached"] == whole_blocks(LENGTHS)
    assert again["metrics"][READ] == sum(whole_blocks(LENGTHS)) // 32 * BLOCK_BYTES


def test_after_a_change_of_weights_nothing_is_found(story: dict[str, Any]) -> None:
    """vLLM's host memory is reset with the tier."""
    written = story["written"]
    assert written["cached"] == [0] * len(LENGTHS)
    assert written["tokens"] == story["plain, written"] != story["plain"][:-1]
