"""LoRA adapters on a real engine: one that was replaced at its name and path is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm.support.adapters import write_adapter
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.play import play_round, prompts_of, whole_blocks

LENGTHS = [300, 417]  #: in tokens
WITH_LORA = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 2}


def rounds(
    model: str, config: dict[str, Any] | None, path: str, *, in_place: tuple[bool, ...]
) -> list[dict[str, Any]]:
    """Play in one engine, once for each of ``in_place``; the adapter is replaced before a True."""
    from vllm.lora.request import LoRARequest

    told = []
    with engine(model, config, **WITH_LORA) as running:
        generate = running.llm.generate
        for anew in in_place:
            if anew:
                write_adapter(Path(path), 2)
            adapter = LoRARequest("a", 1, path, load_inplace=anew)

            def by_adapter(*given: Any, adapter: Any = adapter, **named: Any) -> Any:
                return generate(*given, **named, lora_request=adapter)

            running.llm.generate = by_adapter
            running.forget()
            told.append(
                running.run_one_by_one(prompts_of(LENGTHS)).as_json()
                if config is None
                else play_round(running, prompts_of(LENGTHS))
            )
    return told


def replaced(model: str, folder: str) -> dict[str, Any]:
    path = f"{folder}/adapter"
    config = kvtier_config(secondary_tiers=[{"type": "fs", "root_dir": f"{folder}/kv"}])
    told: dict[str, Any] = {}
    write_adapter(Path(path), 1)
    plain = rounds(model, None, path, in_place=(False, True))
    told["plain 1"], told["plain 2"] = (each["tokens"] for each in plain)
    write_adapter(Path(path), 1)
    told["first"], told["in place"] = rounds(model, config, path, in_place=(False, True))
    told["second again"] = rounds(model, config, path, in_place=(False,))[0]
    write_adapter(Path(path), 1)
    told["first again"] = rounds(model, config, path, in_place=(False,))[0]
    return told


def test_a_replaced_adapter_finds_nothing_of_the_old_one(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Within a running engine and after a restart; each finds again what it has stored itself."""
    told = run_scenario(replaced, log_folder=log_folder, model=str(llama), folder=str(tmp_path))
    assert told["plain 1"] != told["plain 2"]
    whole = whole_blocks(LENGTHS)
    for name, adapter, cached in (
        ("first", 1, [0, 0]),
        ("in place", 2, [0, 0]),
        ("second again", 2, whole),
        ("first again", 1, whole),
    ):
        assert told[name]["tokens"] == told[f"plain {adapter}"], name
        assert told[name]["cached"] == cached, name
