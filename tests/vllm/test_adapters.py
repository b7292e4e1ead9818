"""LoRA adapters in block hashes: by content, and by nothing where nobody can tell it."""

from __future__ import annotations

import os
import shutil
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvtier.vllm.identity import adapters as module
from kvtier.vllm.identity.adapters import Adapters, know_adapters
from tests.vllm.support.adapters import write_adapter
from tests.vllm.support.managers import manager
from tests.vllm.test_hosted_tiers import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOCK_TOKENS = 4
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROMPT = list(range(4 * BLOCK_TOKENS))


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Adapters:
    """Nothing is loaded yet."""
    made = Adapters()
    monkeypatch.setattr(module, "ADAPTERS", made)
    monkeypatch.setattr("kvtier.vllm.scheduler.requests.ADAPTERS", made)
    know_adapters()
    return made


def request(
    path: Path | str | None, number: int = 1, *, in_place: bool = False, name: str = "r"
) -> Request:
    lora = None
    if path is not None:
        lora = LoRARequest("a", number, str(path), load_inplace=in_place)
    init_none_hash(sha256_cbor)
    return Request(
        name,
        PROMPT,
        SamplingParams(max_tokens=9),
        None,
        lora_request=lora,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256_cbor),
    )


def hashes(path: Path | str | None, number: int = 1, *, in_place: bool = False) -> list[bytes]:
    found: list[bytes] = list(request(path, number, in_place=in_place).block_hashes)
    assert len(found) == len(PROMPT) // BLOCK_TOKENS
    return found


def test_what_wraps_the_hash_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Media by content do (``media.py``): whichever comes last must call the other."""
    for owner, name in ((module.EngineCore, "add_lora"), (module.EngineCore, "remove_lora")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # as it is, to be put back
    monkeypatch.setattr(
        module.kv_cache_utils, "generate_block_hash_extra_keys", lambda *_: (("mm", "its own"), 7)
    )
    module._hook_adapters.__wrapped__()
    extra_keys = module.kv_cache_utils.generate_block_hash_extra_keys
    assert extra_keys(request(None), 0, 4, 0) == (("mm", "its own"), 7)


def core_of(load: Callable[[], None]) -> Any:
    """Return vLLM's engine core over workers that do this when they are to load an adapter."""

    def add_lora(_request: LoRARequest) -> bool:
        load()
        return True

    core = object.__new__(module.EngineCore)
    core.model_executor = SimpleNamespace(add_lora=add_lora, remove_lora=lambda _number: True)
    return core


def touch(folder: Path) -> None:
    """Give the files another time, as a copy to the same place does."""
    for file in folder.iterdir():
        later_ns = file.stat().st_mtime_ns + 1_000_000_000
        os.utime(file, ns=(later_ns, later_ns))


def test_an_adapter_is_known_by_its_bytes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy on another host is the same; one that was replaced at its path is another."""
    write_adapter(tmp_path / "a", 1)
    write_adapter(tmp_path / "b", 2)
    first = hashes(tmp_path / "a")
    assert hashes(tmp_path / "a") == first
    others = [hashes(None), hashes(tmp_path / "b", 2)]
    assert not set(first).intersection(*others)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    write_adapter(tmp_path / "a", 2)
    monkeypatch.setattr(module, "ADAPTERS", Adapters())  # of the other host, or after the restart
    assert hashes(tmp_path / "c") == first
    assert not set(hashes(tmp_path / "a", 2)) & set(first)


def test_files_that_change_under_a_loaded_adapter_are_nobody_knows_whose(tmp_path: Path) -> None:
    """A worker goes on with what it has loaded, or reads them again: each request by itself."""
    write_adapter(tmp_path / "a", 1)
    first = hashes(tmp_path / "a")
    write_adapter(tmp_path / "a", 2)
    touch(tmp_path / "a")
    with capture_logs() as lines:
        second, third = hashes(tmp_path / "a"), hashes(tmp_path / "a")
    assert len({*first, *second, *third}) == 3 * len(first)
    (line,) = lines
    assert "load_inplace" in line["event"]
    assert (line["adapter"], line["path"]) == ("a", str(tmp_path / "a"))


def test_loading_in_place_is_another_adapter_and_the_old_one_comes_back(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", 1)
    first = hashes(tmp_path / "a")
    write_adapter(tmp_path / "a", 2)
    touch(tmp_path / "a")
    second = hashes(tmp_path / "a", in_place=True)
    assert not set(second) & set(first)
    assert hashes(tmp_path / "a") == second, "loaded, it is known"
    write_adapter(tmp_path / "a", 1)
    assert hashes(tmp_path / "a", in_place=True) == first


def test_an_engine_that_is_told_to_load_or_remove_one_tells(
    tmp_path: Path, known: Adapters
) -> None:
    """vLLM's server loads an adapter long before its first request; files may change meanwhile."""
    core = core_of(lambda: None)
    write_adapter(tmp_path / "a", 1)
    lora = LoRARequest("a", 1, str(tmp_path / "a"))
    assert core.add_lora(lora)
    write_adapter(tmp_path / "a", 2)
    touch(tmp_path / "a")
    assert known.digest(lora).startswith("unknown")
    assert core.remove_lora(1)
    assert core.add_lora(lora)
    assert not known.digest(lora).startswith("unknown")


def test_an_adapter_that_is_not_loaded_again_stays_what_it_was(
    tmp_path: Path, known: Adapters
) -> None:
    """vLLM takes a second call for nothing, and a call that fails changes nothing."""
    fails = False

    def load() -> None:
        if fails:
            raise ValueError("no such adapter")

    core = core_of(load)
    write_adapter(tmp_path / "a", 1)
    lora = LoRARequest("a", 1, str(tmp_path / "a"))
    core.add_lora(lora)
    write_adapter(tmp_path / "a", 2)
    touch(tmp_path / "a")
    core.add_lora(lora)
    assert known.digest(lora).startswith("unknown")
    fails = True
    with pytest.raises(ValueError, match="no such"):
        core.add_lora(LoRARequest("a", 1, str(tmp_path / "a"), load_inplace=True))
    assert known.digest(lora).startswith("unknown")


def test_files_that_change_while_an_adapter_is_loaded_are_nobody_knows_whose(
    tmp_path: Path, known: Adapters
) -> None:
    def load() -> None:
        write_adapter(tmp_path / "a", 2)
        touch(tmp_path / "a")

    core = core_of(load)
    write_adapter(tmp_path / "a", 1)
    lora = LoRARequest("a", 1, str(tmp_path / "a"))
    core.add_lora(lora)
    with capture_logs() as lines:
        assert known.digest(lora).startswith("unknown")
    assert "after its files have changed" in lines[0]["event"]
    core_of(lambda: None).add_lora(LoRARequest("a", 1, str(tmp_path / "a"), load_inplace=True))
    assert not known.digest(lora).startswith("unknown"), "as the log says"


def test_one_of_a_hub_is_told_once_its_files_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: Adapters
) -> None:
    """A worker downloads it while it is loaded; its hits were lost."""
    repository = tmp_path / "models--org--adapter"
    monkeypatch.setattr(
        module, "snapshot_download", partial(module.snapshot_download, cache_dir=tmp_path)
    )

    def load() -> None:
        write_adapter(repository / "snapshots" / COMMIT, 1)
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text(COMMIT)

    core = core_of(load)
    lora = LoRARequest("a", 1, "org/adapter")
    assert known.digest(lora).startswith("unknown")
    core.add_lora(lora)
    digest = known.digest(lora)
    assert not digest.startswith("unknown")
    write_adapter(tmp_path / "copy", 1)
    assert Adapters().digest(LoRARequest("a", 1, str(tmp_path / "copy"))) == digest


@pytest.mark.parametrize("path", ["org/adapter", "/nowhere/at/all", "empty"])
def test_one_whose_files_are_not_here_is_known_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with capture_logs() as lines:
        assert not set(hashes(path)) & set(hashes(path))
    assert [line["path"] for line in lines] == [path]
    assert "can't be read" in lines[0]["event"]


def test_another_path_under_the_same_number_is_not_loaded_by_that(tmp_path: Path) -> None:
    """vLLM tells adapters apart by their numbers."""
    write_adapter(tmp_path / "a", 1)
    write_adapter(tmp_path / "b", 2)
    hashes(tmp_path / "a")
    assert not set(hashes(tmp_path / "b")) & set(hashes(tmp_path / "b"))
    assert set(hashes(tmp_path / "b", in_place=True)) == set(hashes(tmp_path / "b"))


@pytest.fixture
def engine() -> Iterator[Engine]:
    with manager() as built:
        yield Engine(built)


def test_what_runs_while_its_adapter_is_replaced_is_not_stored(
    tmp_path: Path, known: Adapters, engine: Engine
) -> None:
    write_adapter(tmp_path / "a", 1)
    engine.store([2])
    running = request(tmp_path / "a", name="r2")
    with engine.request([1]) as context:
        assert context.req_id == running.request_id
        write_adapter(tmp_path / "a", 2)
        known.loaded(LoRARequest("a", 1, str(tmp_path / "a"), load_inplace=True), ())
        grant = engine.manager.prepare_store([(1).to_bytes(32, "big") + bytes(4)], context)
        assert grant is not None
        assert grant.keys_to_store == []
    assert engine.read([2]) == [2]
    late = request(tmp_path / "a", name=f"r{engine._requests + 1}")  # has waited since
    known.mixed.add(late.request_id)
    assert engine.read([2]) == []
    assert known.mixed == set()
    with engine.request([1]) as context:
        grant = engine.manager.prepare_store([(1).to_bytes(32, "big") + bytes(4)], context)
        assert len(grant.keys_to_store) == 1
