"""Host memory for all engines of a start is looked for before a model is loaded."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.settings import host_memory
from kvtier.vllm import engines_here
from kvtier.vllm.engines_here import require_memory
from tests.vllm.support.engine import kvtier_config

pytestmark = pytest.mark.one_release
MIB = 1 << 20


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Make this a host of 100 MiB, of which 50 MiB may be shared, where nothing has started."""
    host = SimpleNamespace(most=100 * MIB, shared=50 * MIB)
    monkeypatch.delenv(engines_here._LOOKED_BY, raising=False)
    monkeypatch.setattr(host_memory, "machine_memory_bytes", lambda _root: host.most)
    monkeypatch.setattr(
        os, "statvfs", lambda _: SimpleNamespace(f_bavail=host.shared // 4096, f_frsize=4096)
    )
    return host


def start(extra: dict[str, Any] | None = None, **parallel: Any) -> Any:
    """Return the configuration of a start, as far as it is looked at."""
    of_one = {
        "data_parallel_size_local": 1,
        "data_parallel_rank": 0,
        "data_parallel_backend": "mp",
        "distributed_executor_backend": "mp",
        "world_size": 1,
    }
    extra = kvtier_config(cpu_bytes_to_use="20MiB") if extra is None else extra
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        parallel_config=SimpleNamespace(**{**of_one, **parallel}),
    )


def test_engines_that_fit_together_start() -> None:
    require_memory(start(data_parallel_size_local=2, world_size=4))


def test_engines_that_fit_one_by_one_and_not_together_are_refused() -> None:
    """The third would end once its model is loaded, and the others with it."""
    three = start(data_parallel_size_local=3, data_parallel_rank=4, world_size=2)
    with pytest.raises(ConfigError) as refused:
        require_memory(three)
    assert str(refused.value) == (
        "kv_connector_extra_config: cpu_bytes_to_use='20MiB' for each of data-parallel ranks "
        "4, 5, 6 (2 workers share it) needs 62914560 bytes of shared memory, but 52428800 bytes "
        "are free in /dev/shm. Lower cpu_bytes_to_use, or give the host more shared memory "
        "(docker run --shm-size, or an emptyDir volume with medium: Memory)."
    )


def test_engines_that_the_machine_or_its_control_group_cannot_hold_are_refused(
    host: SimpleNamespace,
) -> None:
    """Where ``/dev/shm`` is larger than a container's limit, the kernel would kill the last one."""
    host.shared = 1000 * MIB
    with pytest.raises(ConfigError) as refused:
        require_memory(start(data_parallel_size_local=6))
    for part in ("ranks 0, 1, 2, 3, 4, 5", "(125829120 bytes together)", "104857600", "Lower it"):
        assert part in str(refused.value)


@pytest.mark.parametrize("of", [{}, {"spec_name": "TieringOffloadingSpec"}])
def test_memory_of_other_connectors_is_not_counted(of: dict[str, Any]) -> None:
    """vLLM looks after its own."""
    ours = {"kv_connector_extra_config": kvtier_config(cpu_bytes_to_use="60MiB")}
    others = {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 60, **of}}
    require_memory(start({"connectors": [others, {}]}))
    with pytest.raises(ConfigError, match="62914560 bytes of shared memory"):
        require_memory(start({"connectors": [others, ours]}))


@pytest.mark.parametrize("place", ["distributed_executor_backend", "data_parallel_backend"])
def test_engines_that_ray_places_are_not_looked_at_here(place: str) -> None:
    """Ray may start them on another host, which has more."""
    require_memory(start(data_parallel_size_local=9, **{place: "ray"}))


def test_the_api_servers_of_a_start_do_not_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They make the configuration again, by when the engines have what was free."""
    require_memory(start())
    server = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: server)
    require_memory(start(data_parallel_size_local=9))


def test_a_process_that_starts_another_engine_looks_again() -> None:
    require_memory(start())
    with pytest.raises(ConfigError, match="ranks 0, 1, 2"):
        require_memory(start(data_parallel_size_local=3))
