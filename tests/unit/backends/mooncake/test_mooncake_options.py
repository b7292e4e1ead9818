"""Options are refused at the door, with key, value and remedy."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import ConfigError, StoreFault
from kvtier_backends.mooncake import MooncakeBackend
from kvtier_backends.mooncake.connection import knock
from kvtier_backends.mooncake.mooncake_options import read_options
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
        ({"master": "://host:1"}, "must be a host and a port"),
        ({"master": "host:1;host:2"}, "must be a host and a port"),
        ({"master": "etcd://"}, "as in etcd://host:2379;host2:2379"),
        ({"master": "etcd://host"}, "as in etcd://host:2379;host2:2379"),
        ({"master": "etcd://host:1;"}, "as in etcd://host:2379;host2:2379"),
        ({"master": "etcd://host:1;host:0"}, "as in etcd://host:2379;host2:2379"),
        ({"master": "redis://host:1;host:2"}, "as in etcd://host:2379;host2:2379"),
        ({"device": "mlx5_0"}, "device='mlx5_0' is for RDMA: remove it"),
        ({"protocol": "ucx"}, "protocol='ucx' must be one of tcp, rdma"),
        ({"segment_bytes": 1000}, "segment_bytes=1000 has no room for one block of 262144 bytes"),
        ({"ssd_offload_path": "/nvme"}, "ssd_offload_path='/nvme' has nothing to move there"),
        ({"key_prefix": "a//b"}, "key_prefix='a//b' must be letters"),
        ({"key_prefix": "/a"}, "key_prefix='/a' must be letters"),
        ({"presence_ttl_s": 0}, "presence_ttl_s=0 must be above 0"),
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


@pytest.mark.parametrize(
    ("master", "addresses"),
    [
        ("host:1", [("host", 1)]),
        ("[::1]:1", [("::1", 1)]),
        ("etcd://10.0.0.1:2379", [("10.0.0.1", 2379)]),
        ("etcd://[::1]:1;host:2;10.0.0.1:3", [("::1", 1), ("host", 2), ("10.0.0.1", 3)]),
        ("redis://host:6379", [("host", 6379)]),
    ],
)
def test_elected_masters_are_named_as_mooncakes_client_takes_them(
    master: str, addresses: list[tuple[str, int]]
) -> None:
    given = read_options({"master": master}, CONTEXT)[1]
    assert given.knock_addresses == addresses
    assert given.master == master, "which the client is given as it is"
    assert make_mooncake(master).place == f"mooncake://{master}/kvtier"


def test_a_server_that_knows_the_elected_master_is_looked_for_among_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as etcd:
        port = etcd.getsockname()[1]
        there = {"master": f"etcd://127.0.0.1:1;127.0.0.1:{port}"}
        assert knock(read_options(there, CONTEXT)[1]) == "127.0.0.1"
    nobody = {"master": "etcd://127.0.0.1:1;localhost:1"}
    with pytest.raises(StoreFault, match=r"refused.*; .*refused"):
        knock(read_options(nobody, CONTEXT)[1])


def test_presence_is_believed_for_as_long_as_is_said() -> None:
    assert make_mooncake(ADDRESS, presence_ttl_s=2.5).traits.presence_ttl_s == 2.5
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
