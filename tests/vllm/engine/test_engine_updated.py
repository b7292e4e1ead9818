"""Weights are pushed into a running engine, and nobody tells the connector, as in most RL loops."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import PATIENT, Engine, engine, kvtier_config, vllms_config
from tests.vllm.support.play import Steps, assert_at_rest, play_round, prompts_of, whole_blocks
from tests.vllm.support.weights import WorkerExtension, fine_tune, write_into

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

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


def fs(root: str, **keys: Any) -> dict[str, Any]:
    return kvtier_config(secondary_tiers=[{"type": "fs", "root_dir": root}], **keys)


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


@pytest.fixture(scope="module")
def folder(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, and with weights that were trained from it twice."""
    root = tmp_path_factory.mktemp("updated")
    (root / "model").symlink_to(llama)
    for number in (1, 2):
        fine_tune(llama / "model.safetensors", root / f"{number}.safetensors", seed=number)
    return root


@pytest.fixture(scope="module")
def right(folder: Path) -> list[list[list[int]]]:
    told: list[list[list[int]]] = run_scenario(
        without_kvtier, log_folder=folder / "logs", folder=str(folder)
    )
    assert all(one != other for one, other in combinations(told, 2))
    return told


def updates(folder: str, root: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    with engine(f"{folder}/model", fs(root)) as running:
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
    with engine(f"{folder}/model", fs(root)) as running:
        told["restarted, others"] = played(running, OTHER)
        told["restarted"] = played(running)
    return told


def test_nothing_that_older_weights_computed_is_used_whoever_changes_them(
    folder: Path, right: list[list[list[int]]], log_folder: Path, tmp_path: Path
) -> None:
    """Old KV data was served to the new weights, and the new one's to all with the old weights."""
    told = run_scenario(updates, log_folder=log_folder, folder=str(folder), root=str(tmp_path))
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


def rollouts(folder: str, root: str) -> list[dict[str, Any]]:
    """Start with random weights, be pushed others, and be given their number."""
    told = []
    for number in (1, 2, 1):
        with engine(f"{folder}/model", fs(root), load_format="dummy") as running:
            push(running, folder, number)
            running.llm.llm_engine.set_weight_version("1")
            told.append(played(running))
    return told


@pytest.mark.one_release
def test_pushed_weights_are_found_again_by_their_number_and_their_content(
    folder: Path, right: list[list[list[int]]], log_folder: Path, tmp_path: Path
) -> None:
    """All runs number their weights alike, and start with the same random ones."""
    first, other_run, again = run_scenario(
        rollouts, log_folder=log_folder, folder=str(folder), root=str(tmp_path)
    )
    assert first == {"tokens": right[1], "cached": [0, 0]}
    assert other_run == {"tokens": right[2], "cached": [0, 0]}
    assert again == {"tokens": right[1], "cached": whole_blocks(LENGTHS)}


def named_rollouts(folder: str, root: str) -> list[dict[str, Any]]:
    told = []
    for number, key in (
        (1, {}),
        (2, {}),
        (1, {"weights_version": "a"}),
        (1, {"weights_version": "a"}),
    ):
        with engine(f"{folder}/model", fs(root, **key), load_format="dummy") as running:
            push(running, folder, number)
            told.append(played(running))
            push(running, folder, 2)
            told.append(played(running, OTHER))
    return told


@pytest.mark.long
def test_weights_version_names_the_first_weights_that_random_ones_are_replaced_by(
    folder: Path, right: list[list[list[int]]], log_folder: Path, tmp_path: Path
) -> None:
    """What follows them has no name, and neither has anything without it."""
    told = run_scenario(
        named_rollouts, log_folder=log_folder, folder=str(folder), root=str(tmp_path)
    )
    assert [each["tokens"] for each in told[::2]] == [right[number] for number in (1, 2, 1, 1)]
    nothing = [0, 0]
    assert [each["cached"] for each in told[::2]] == [nothing] * 3 + [whole_blocks(LENGTHS)]
    assert [each["cached"] for each in told[1::2]] == [nothing] * 4


def behind_vllms_tiering(folder: str, root: str) -> list[dict[str, Any]]:
    tier = {"type": "disk", "path": root, "capacity_bytes": 32 << 20, **PATIENT}
    told = []
    with engine(f"{folder}/model", vllms_config(16 << 20, tier)) as running:
        for number in (0, None, 1, None):
            if number:
                push(running, folder, number)
            running.forget()
            result = running.run_one_by_one(prompts_of(LENGTHS))
            running.idle()
            told.append({"tokens": result.tokens, "cached": result.cached})
    with engine(f"{folder}/model", vllms_config(16 << 20, tier)) as running:
        running.run(prompts_of([100], OTHER))  # what a disk has is known a moment after the start
        running.idle()
        result = running.run_one_by_one(prompts_of(LENGTHS))
        told.append({"tokens": result.tokens, "cached": result.cached})
    return told


@pytest.mark.long
def test_it_is_noticed_behind_vllms_own_tiering_too(
    folder: Path, right: list[list[list[int]]], log_folder: Path, tmp_path: Path
) -> None:
    """vLLM's host memory is reset with the tier, and the next start finds what is its own."""
    told = run_scenario(
        behind_vllms_tiering, log_folder=log_folder, folder=str(folder), root=str(tmp_path / "kv")
    )
    whole, nothing = whole_blocks(LENGTHS), [0, 0]
    assert [each["tokens"] for each in told] == [right[number] for number in (0, 0, 1, 1, 0)]
    assert [each["cached"] for each in told] == [nothing, whole, nothing, whole, whole]


def in_processes(model: str, **settings: Any) -> dict[str, Any]:
    """Play with an engine's core in a process of its own, and workers in theirs."""
    told: dict[str, Any] = {}
    extension = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"
    with engine(model, kvtier_config(), worker_extension_cls=extension, **settings) as running:

        def play_as(name: str) -> None:
            running.forget()
            result = running.run_one_by_one(prompts_of(LENGTHS))
            told[name] = {"tokens": result.tokens, "cached": result.cached}

        play_as("cold")
        play_as("warm")
        for method in ("count_numbers", "turn", "count_numbers", "reload_weights"):
            running.llm.collective_rpc(method)
            play_as(f"{len(told)}: {method}")
    return told


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_noticed_in_other_processes_too(llama: Path, log_folder: Path, ranks: int) -> None:
    several = {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
    told = run_scenario(
        in_processes,
        log_folder=log_folder,
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
        },
        spawns=True,
        model=str(llama),
        **(several if ranks > 1 else {}),
    )
    whole, nothing = whole_blocks(LENGTHS), [0, 0]
    cached = [each["cached"] for each in told.values()]
    assert cached == [nothing, whole, whole, nothing, whole, nothing], told
    tokens = [each["tokens"] for each in told.values()]
    assert tokens[0] == tokens[1] == tokens[2] == tokens[5] != tokens[3] == tokens[4]
