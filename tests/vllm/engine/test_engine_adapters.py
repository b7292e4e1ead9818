"""LoRA adapters on a real engine: one that was replaced at its name and path is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.support.adapters import write_adapter
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.play import play_round, prompts_of, whole_blocks

LENGTHS = [300, 417]  #: in tokens


def rounds(
    model: str, config: dict[str, Any] | None, path: str, *, in_place: tuple[bool, ...]
) -> list[dict[str, Any]]:
    """Play in one engine, once for each of ``in_place``; the adapter is replaced before a True."""
    from vllm.lora.request import LoRARequest

    told = []
    with engine(model, config, enable_lora=True, max_lora_rank=16, max_loras=2) as running:
        generate = running.llm.generate
        for anew in in_place:
            if anew:
                write_adapter(Path(path), 2)
            adapter = LoRARequest("a", 1, path, load_inplace=anew)

            def by_adapter(*given: Any, adapter: Any = adapter, **named: Any) -> Any:
                return generate(*given, **named, lora_request=adapter)

            running.llm.generate = by_adapter
            if config is None:
                running.forget()
                told.append(running.run_one_by_one(prompts_of(LENGTHS)).as_json())
            else:
                told.append(play_round(running, prompts_of(LENGTHS)))
    return told


def replaced(model: str, folder: str) -> dict[str, Any]:
    path = f"{folder}/adapter"
    config = kvtier_config(secondary_tiers=[{"type": "fs", "root_dir": f"{folder}/kv"}])
    told: dict[str, Any] = {}
    for name, given in (("plain", None), ("kvtier", config)):
        write_adapter(Path(path), 1)
        told[name] = rounds(model, given, path, in_place=(False, True))
    told["restarted"] = rounds(model, config, path, in_place=(False,))
    return told


@pytest.mark.one_release
def test_a_replaced_adapter_finds_nothing_of_the_old_one(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Within a running engine; and after a restart the new one finds what it has stored itself."""
    told = run_scenario(replaced, log_folder=log_folder, model=str(llama), folder=str(tmp_path))
    first, second = (each["tokens"] for each in told["plain"])
    assert first != second
    for each, tokens, cached in zip(
        (*told["kvtier"], *told["restarted"]),
        (first, second, second),
        ([0, 0], [0, 0], whole_blocks(LENGTHS)),
        strict=True,
    ):
        assert (each["tokens"], each["cached"]) == (tokens, cached)
