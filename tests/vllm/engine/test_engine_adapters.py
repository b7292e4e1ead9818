"""LoRA adapters on a real engine: one that was replaced at its name and path is another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import until
from tests.vllm.support.adapters import write_adapter
from tests.vllm.support.children import run_scenario, start_scenario
from tests.vllm.support.engine import Engine, engine, kvtier_config
from tests.vllm.support.play import play_round, prompts_of, whole_blocks

LENGTHS = [300, 417]  #: in tokens
WITH_LORA = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 2}


def with_adapter(
    running: Engine, path: str, *, number: int = 1, in_place: bool = False, plain: bool = False
) -> dict[str, Any]:
    """Play the prompts with an adapter, which vLLM knows by its number and path."""
    from vllm.lora.request import LoRARequest

    generate = running.llm.generate
    adapter = LoRARequest("a", number, path, load_inplace=in_place)

    def by_adapter(*given: Any, **named: Any) -> Any:
        return generate(*given, **named, lora_request=adapter)

    running.llm.generate = by_adapter
    try:
        if not plain:
            return play_round(running, prompts_of(LENGTHS))
        running.forget()
        return running.run_one_by_one(prompts_of(LENGTHS)).as_json()
    finally:
        running.llm.generate = generate


def rounds(
    model: str, config: dict[str, Any] | None, path: str, *, in_place: tuple[bool, ...]
) -> list[dict[str, Any]]:
    """Play in one engine, once for each of ``in_place``; the adapter is replaced before a True."""
    told = []
    with engine(model, config, **WITH_LORA) as running:
        for anew in in_place:
            if anew:
                write_adapter(Path(path), 2)
            told.append(with_adapter(running, path, in_place=anew, plain=config is None))
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


@pytest.mark.one_release
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


def plain_tokens(model: str, paths: list[str]) -> list[list[list[int]]]:
    with engine(model, None, **WITH_LORA) as running:
        played = [
            with_adapter(running, path, number=1 + number, plain=True)
            for number, path in enumerate(paths)
        ]
    return [each["tokens"] for each in played]


def of_one_engine(model: str, config: dict[str, Any], path: str, number: int) -> dict[str, Any]:
    with engine(model, config, **WITH_LORA) as running:
        return with_adapter(running, path, number=number)


def of_one_that_stays(
    model: str, config: dict[str, Any], path: str, stored: str, others_have_ended: str
) -> list[dict[str, Any]]:
    """Play before the other engines, and once more, while it still runs, after them."""
    with engine(model, config, **WITH_LORA) as running:
        before = with_adapter(running, path)
        Path(stored).touch()
        until(Path(others_have_ended).exists)
        return [before, with_adapter(running, path)]


@pytest.mark.one_release
def test_engines_share_by_an_adapters_bytes_and_not_by_its_path(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """Two start while the first one runs: with other files at its path, and with a copy of its own.

    After that nothing tells what the first one's worker has loaded: it finds nothing either.
    """
    path, second, copy = (tmp_path / name for name in ("adapter", "second", "copy"))
    write_adapter(path, 1)
    write_adapter(second, 2)
    shutil.copytree(path, copy)
    stored, others_have_ended = (tmp_path / name for name in ("stored", "ended"))
    config = kvtier_config(secondary_tiers=[{"type": "fs", "root_dir": str(tmp_path / "kv")}])
    common = {"model": str(llama), "log_folder": log_folder}
    engines = {**common, "config": config}
    plain = run_scenario(plain_tokens, **common, paths=[str(path), str(second)])
    with start_scenario(
        of_one_that_stays,
        environment={},
        **engines,
        path=str(path),
        stored=str(stored),
        others_have_ended=str(others_have_ended),
    ) as first:
        first.wait_for(stored)
        shutil.rmtree(path)
        shutil.copytree(second, path)
        replaced = run_scenario(of_one_engine, **engines, path=str(path), number=1)
        copied = run_scenario(of_one_engine, **engines, path=str(copy), number=2)
        others_have_ended.touch()
        before, after = first.result()
        log = first.log()
    assert plain[0] != plain[1]
    for told, tokens, cached in (
        (before, plain[0], [0, 0]),
        (replaced, plain[1], [0, 0]),
        (copied, plain[0], whole_blocks(LENGTHS)),
        (after, plain[0], [0, 0]),
    ):
        assert told["tokens"] == tokens
        assert told["cached"] == cached
    assert "nothing tells what this LoRA adapter holds" in log
