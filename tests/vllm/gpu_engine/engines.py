"""The engines: each runs in a process of its own, and leaves what it has seen."""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.vllm.support.engine import Engine, engine, kvtier_config
from tests.vllm.support.notes import leave
from tests.vllm.support.play import prompts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTHS = [1000, 650, 900, 500, 333, 777]  #: in tokens; a whole number of blocks is none of them
MORE_LENGTHS = [420, 870]  #: of prompts that only the engine that is killed has computed
OUTPUT_TOKENS = 16
DISK_BYTES = 128 << 20
LOADED = "vllm:kv_offload_load_bytes"
READ = 'vllm:kv_offload_tiering_read_bytes{tier="1:disk"}'
SETTINGS: dict[str, dict[str, Any]] = {
    # What a user's model has; little of a GPU's memory, of which a killed engine's comes back late.
    "cuda": {"dtype": "float16", "gpu_memory_utilization": 0.3},
    "cpu": {"dtype": "float32"},
}


def first_engine(running: Engine) -> Iterator[tuple[str, Any]]:
    """Compute, serve from DRAM, sound and damaged, then from disk."""
    prompts = prompts_of(LENGTHS)
    yield from _cold(running, prompts, "cold", "prefix cache")
    yield "DRAM", _round(running, prompts)
    _fill_slots_from_the_one_before(running)
    yield "DRAM, slots changed places", _round(running, prompts)
    _zero_slots(running)
    yield "DRAM, zeroed", _round(running, prompts)
    assert running.llm.reset_prefix_cache(reset_connector=True)
    yield "disk", _round(running, prompts)


def restarted_engine(running: Engine) -> Iterator[tuple[str, Any]]:
    """Serve what the first engine left, store more, and work until killed."""
    yield "restart", _round(running, prompts_of(LENGTHS))
    yield from _cold(running, _more_prompts(), "more, cold", "more, prefix cache")
    yield "", None  # all that was told is left for who kills this
    for number in count(1):
        running.run(prompts_of(LENGTHS, seed=1000 * number))


def engine_after_a_kill(running: Engine) -> Iterator[tuple[str, Any]]:
    """Serve what the killed engine had."""
    yield "kill -9", _round(running, prompts_of(LENGTHS))
    yield "more, kill -9", _round(running, _more_prompts())


ENGINES = {each.__name__: each for each in (first_engine, restarted_engine, engine_after_a_kill)}


def main(name: str, device: str, folder_name: str, engine_id: str) -> None:
    """Run one of ``ENGINES``; leave what it tells in a file of the folder."""
    from vllm.platforms import current_platform

    assert current_platform.device_type == device, current_platform
    folder = Path(folder_name)
    disk = {"type": "disk", "path": str(folder / "disk"), "capacity_bytes": DISK_BYTES}
    config = kvtier_config(secondary_tiers=[disk], on_reset="keep")
    told: dict[str, Any] = {}
    settings = {**SETTINGS[device], "engine_id": engine_id}
    with engine(str(folder / "model"), config, **settings) as running:
        for round_name, figures in ENGINES[name](running):
            if round_name:
                told[round_name] = figures
            else:
                leave(str(folder / name), json.dumps(told))
    leave(str(folder / name), json.dumps(told))


def _more_prompts() -> list[list[int]]:
    return prompts_of(MORE_LENGTHS, seed=77)


def _cold(
    running: Engine, prompts: list[list[int]], cold: str, again: str
) -> Iterator[tuple[str, Any]]:
    """Ask each prompt twice in a row."""
    told = _round(running, [prompt for prompt in prompts for _ in range(2)])
    for first, name in enumerate((cold, again)):
        halves = {key: told[key][first::2] for key in ("tokens", "cached")}
        yield name, {**told, **halves}


def _round(running: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    """Ask the prompts one by one; what vLLM's own prefix cache has of them is forgotten before."""
    running.settle()
    running.forget()
    before = running.metrics()
    told = running.run_one_by_one(prompts, OUTPUT_TOKENS)
    running.settle()
    block_bytes = running.manager()._memory.block_bytes
    after = running.metrics()
    moved = {
        key: (after.get(metric, 0.0) - before.get(metric, 0.0)) / block_bytes
        for key, metric in (("loaded", LOADED), ("read", READ))
    }
    return {"tokens": told.tokens, "cached": told.cached, **moved}


def _fill_slots_from_the_one_before(running: Engine) -> None:
    memory = running.manager()._memory
    contents = [bytes(memory.view(slot)) for slot in range(memory.slot_count)]
    for slot, content in enumerate(contents):
        memory.view((slot + 1) % memory.slot_count)[:] = content


def _zero_slots(running: Engine) -> None:
    memory = running.manager()._memory
    for slot in range(memory.slot_count):
        memory.view(slot)[:] = bytes(memory.block_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
