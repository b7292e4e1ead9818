"""Weights are pushed into a running engine, and nobody tells the connector, as in most RL loops."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import Engine, engine, kvtier_config
from tests.vllm.support.play import Steps, assert_at_rest, play_round, prompts_of, whole_blocks
from tests.vllm.support.weights import fine_tune, write_into

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [300, 145]  #: in tokens
OTHER = 1000  #: the seed of prompts that one generation alone is asked
WRITTEN = 3  #: the first weights that were pushed, with something written into them


def push(running: Engine, folder: str, number: int) -> None:
    """Give the engine weights as a trainer does. 0: those of the files."""
    name = f"{folder}/{number}.safetensors" if number else f"{folder}/model/model.safetensors"
    pushed = iter(load_file(name).items())
    running.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pushed})


def write(running: Engine) -> None:
    """Write weights past all methods of the engine, as a trainer in its process can."""
    write_into(running.core().model_executor.driver_worker.get_model())


def played(running: Engine, seed: int = 7) -> dict[str, Any]:
    """Play with an empty prefix cache of the engine's own. The connector is not reset."""
    told = play_round(running, prompts_of(LENGTHS, seed))
    assert_at_rest(told["statistics"])
    return {"tokens": told["tokens"], "cached": told["cached"]}


def without_kvtier(folder: str) -> list[list[list[int]]]:
    """Return what is right with each of the weights, and with the last ones after a ``write``."""
    with engine(f"{folder}/model", None) as running:
        told = []
        for number in (0, 2, 1, WRITTEN):
            if number == WRITTEN:
                write(running)
            else:
                push(running, folder, number)
            running.forget()
            told.append(running.run_one_by_one(prompts_of(LENGTHS)).tokens)
        return [told[0], told[2], told[1], told[WRITTEN]]


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """Return a folder with a model, and with weights that were trained from it twice."""
    (tmp_path / "model").symlink_to(llama)
    for number in (1, 2):
        fine_tune(llama / "model.safetensors", tmp_path / f"{number}.safetensors", seed=number)
    return tmp_path


def updates(folder: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    # Each would serve what the others don't: a miss is one of all three.
    tiers: list[dict[str, Any]] = [
        {"type": "memory", "capacity_bytes": 32 << 20},
        {"type": "disk", "path": f"{folder}/disk", "capacity_bytes": 32 << 20},
        {"type": "fs", "root_dir": f"{folder}/kv"},
    ]
    config = kvtier_config(secondary_tiers=tiers)
    with engine(f"{folder}/model", config) as running:
        told["original"] = played(running)
        running.llm.collective_rpc("get_model_inspection")
        running.llm.apply_model(lambda model: sum(each.numel() for each in model.parameters()))
        told["looked at"] = played(running)
        push(running, folder, 1)
        told["pushed"] = played(running)
        told["pushed, again"] = played(running)
        write(running)
        told["written"] = played(running)
        push(running, folder, 2)
        # vLLM's own prefix cache has what older weights computed, and serves it.
        running.run_one_by_one(prompts_of(LENGTHS))
        told["over a stale GPU"] = played(running)
        steps = Steps(running)
        steps.add("across", prompts_of(LENGTHS, OTHER)[0], max_tokens=40)
        # Until then it waits for its tier's answer, and is computed with one generation alone.
        steps.until(lambda _: bool(running.core().scheduler.running))
        for _ in range(3):
            steps.step()
        push(running, folder, 1)
        steps.finish()
        told["across"] = played(running, OTHER)
        assert running.llm.reset_prefix_cache(reset_connector=True)
        write(running)
        told["written after a reset"] = played(running)
    with engine(f"{folder}/model", config) as running:
        told["restarted, others"] = played(running, OTHER)
        told["restarted"] = played(running)
    return told


def test_nothing_that_older_weights_computed_is_used_whoever_changes_them(
    folder: Path, log_folder: Path
) -> None:
    """Old KV data was served to the new weights, and the new one's to all with the old weights."""
    right = run_scenario(without_kvtier, log_folder=log_folder, folder=str(folder))
    assert all(one != other for one, other in combinations(right, 2))
    told = run_scenario(updates, log_folder=log_folder, folder=str(folder))
    whole = whole_blocks(LENGTHS)
    for name, number, cached in (
        ("original", 0, [0, 0]),
        ("looked at", 0, whole),
        ("pushed", 1, [0, 0]),
        ("pushed, again", 1, whole),
        ("written", WRITTEN, [0, 0]),
        ("over a stale GPU", 2, [0, 0]),
        ("written after a reset", WRITTEN, [0, 0]),
        ("restarted", 0, whole),
    ):
        assert told[name] == {"tokens": right[number], "cached": cached}, name
    assert told["across"]["cached"] == [0, 0]
    assert told["restarted, others"]["cached"] == [0, 0]


def pauses(model: str) -> dict[str, Any]:
    """Pause with ``mode="keep"`` while the GPU reads: as a trainer does that has new weights."""
    from unittest.mock import patch

    from kvtier.vllm.memory.cpu_worker import CPUPlatformWorker

    (prompt,) = prompts_of([900])
    told: dict[str, Any] = {"raised": []}
    with engine(model, kvtier_config()) as running:
        steps, core = Steps(running), running.core()
        generations = running.manager().facade._generations

        def pause() -> None:
            try:
                core.pause_scheduler("keep", True)
                told["raised"].append("")
            except RuntimeError as error:
                told["raised"].append(str(error))

        told["cold"] = play_round(running, [prompt])
        running.forget()
        generation = generations.mark
        with patch.object(CPUPlatformWorker, "get_finished", lambda _: []):  # it goes on and on
            steps.add("load", prompt)
            steps.until(lambda now: bool(now["primary"]["pinned_slots"]))
            pause()
        for _ in range(3):  # the load ends, and its request keeps what it has
            steps.step()
        pause()
        told["was reset"] = generations.mark != generation
        core.resume_scheduler()
        steps.finish()
        pause()
        told["is reset"] = generations.mark != generation
        core.resume_scheduler()
        told |= {"again": play_round(running, [prompt]), "tokens": steps.tokens}
    return told


@pytest.mark.long  # what vLLM itself does, as a page of ours says
def test_a_pause_that_keeps_requests_fails_during_a_load_and_is_right_after_it(
    llama: Path, log_folder: Path
) -> None:
    """As ``change-weights.md`` says. vLLM alone throws back what it has computed, and no load."""
    told = run_scenario(pauses, log_folder=log_folder, model=str(llama))
    *failed, succeeded = told["raised"]
    assert len(failed) == 2
    for text in failed:
        assert "presence of running requests waiting for remote KV transfer" in text
    assert succeeded == ""
    assert (told["was reset"], told["is reset"]) == (False, True)
    assert told["tokens"]["load"] == told["cold"]["tokens"][0] == told["again"]["tokens"][0]
    assert_at_rest(told["again"]["statistics"])
