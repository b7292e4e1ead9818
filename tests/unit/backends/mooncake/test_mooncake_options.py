"""Options are refused at the door, with key, value and remedy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import ConfigError
from kvtier_backends.mooncake import MooncakeBackend
from tests.unit.backends.mooncake._mooncake import CONTEXT, make_mooncake

if TYPE_CHECKING:
    from pathlib import Path

ADDRESS = "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"master": "host"}, "master='host' must be a host and a port"),
        ({"master": "host:0"}, "must be a host and a port"),
        ({"master": "host:99999"}, "must be a host and a port"),
        ({"master": "http://host:1"}, "must be a host and a port"),
        ({"device": "mlx5_0"}, "device='mlx5_0' is for RDMA: remove it"),
        ({"protocol": "ucx"}, "protocol='ucx' must be one of tcp, rdma"),
        ({"segment_bytes": 1000}, "segment_bytes=1000 has no room for one block of 262144 bytes"),
        ({"ssd_offload_path": "/nvme"}, "ssd_offload_path='/nvme' has nothing to move there"),
        ({"key_prefix": "a//b"}, "key_prefix='a//b' must be letters"),
        ({"key_prefix": "/a"}, "key_prefix='/a' must be letters"),
        ({"presence_s": 0}, "presence_s=0 must be above 0"),
        ({"replicas": 0}, "replicas=0 must be at least 1"),
        ({"n_read_threads": 0}, "n_read_threads=0 must be at least 1"),
        ({"masters": "x"}, "unknown key 'masters'"),
    ],
)
def test_a_bad_option_is_refused_with_its_remedy(options: dict[str, Any], text: str) -> None:
    for call in (MooncakeBackend.from_options, MooncakeBackend.check_options):
        with pytest.raises(ConfigError) as refused:
            call({"master": ADDRESS, **options}, CONTEXT)
        assert text in str(refused.value)


def test_the_master_must_be_named() -> None:
    with pytest.raises(ConfigError, match="master is missing"):
        MooncakeBackend.from_options({}, CONTEXT)


def test_two_tiers_of_one_master_have_places_of_their_own_if_their_prefixes_differ() -> None:
    assert make_mooncake(ADDRESS).place == "mooncake://127.0.0.1:50051/kvtier"
    assert MooncakeBackend.check_options({"master": ADDRESS, "key_prefix": "a/b"}, CONTEXT) == (
        "mooncake://127.0.0.1:50051/a/b"
    )
    assert make_mooncake("[::1]:50051").place == "mooncake://[::1]:50051/kvtier"


def test_presence_is_believed_for_as_long_as_is_said() -> None:
    assert make_mooncake(ADDRESS, presence_s=2.5).traits.presence_s == 2.5
    assert make_mooncake(ADDRESS).traits.capacity_blocks is None


def test_a_library_that_is_not_installed_is_named_with_its_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match="pip install 'mooncake-transfer"):
        make_mooncake(ADDRESS)


def test_a_library_that_cannot_be_linked_is_named_with_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own error for a shared object that is damaged stands for a missing one."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.so").write_bytes(b"no library")
    for name in [each for each in sys.modules if each.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="apt-get install libibverbs1 libcurl4 libnuma1"):
        make_mooncake(ADDRESS)
    monkeypatch.delitem(sys.modules, "mooncake")
