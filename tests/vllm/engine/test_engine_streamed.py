"""A prompt that a client streams: vLLM computes each part as it comes, and answers in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.patience import looks
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import PATIENT, Engine, engine, greedy, kvtier_config, vllms_config
from tests.vllm.support.play import prompts_of, whole_blocks

if TYPE_CHECKING:
    from pathlib import Path

PARTS = [200, 150, 90, 300]  #: in tokens
ANSWER_TOKENS = 40


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


def streamed(model: str, config: dict[str, Any]) -> dict[str, Any]:
    with engine(model, config) as running:
        prompt = stream(running, prompts_of(PARTS))
        running.forget()
        told = {"length": len(prompt), "again": running.run([prompt]).as_json()}
    with engine(model, None) as alone:
        return {**told, "alone": alone.run([prompt]).tokens}


@pytest.mark.parametrize("spec", ["kvtier's", "vLLM's"])
def test_what_was_computed_for_a_streamed_prompt_is_found_as_its_own(
    spec: str, llama: Path, log_folder: Path, tmp_path: Path
) -> None:
    """vLLM 0.32 stored other blocks under the keys of all that followed the first part."""
    tier = {"type": "disk", "path": str(tmp_path / "kv"), "capacity_bytes": 16 << 20, **PATIENT}
    config = kvtier_config() if spec == "kvtier's" else vllms_config(16 << 20, tier)
    told = run_scenario(streamed, log_folder=log_folder, model=str(llama), config=config)
    assert told["length"] == sum(PARTS) + (len(PARTS) - 1) * (ANSWER_TOKENS - 1)
    assert told["again"]["cached"] == whole_blocks([told["length"]])
    assert told["again"]["tokens"] == told["alone"]
