"""``kvtier check --connect`` tries each tier's storage and names the step that fails."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import StorageUnusable
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier.settings.plugins import make_backend
from kvtier.settings.runtime_config import TierConfig
from kvtier.tools.cli.main import main
from tests.support import mooncake_server
from tests.support.fuse_folder import fuse_folder
from tests.support.needs import needs
from tests.support.redis_servers import HOST, free_port, running
from tests.support.s3_fault_server import Fault, fault_server
from tests.support.s3_server import client_for, moto_server, options_for, set_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.redis_servers import RedisServer

SECRET = "hunter2-hunter2"
REMEDIES = {
    errno.EROFS: "Mount it for writing",
    errno.EIO: "See to its storage",
    errno.ENOSPC: "Free space",
    errno.EACCES: "Give this user the rights",
}
RIGHTS = ("+get", "+set", "+exists", "+unlink")


@pytest.fixture
def connect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run the command over tiers that an engine would take, and return what it found."""

    def run(*tiers: dict[str, Any]) -> dict[str, Any]:
        found = checked(tmp_path, capsys, *tiers)
        assert found["refused"] == []
        return found

    return run


def checked(
    folder: Path, capsys: pytest.CaptureFixture[str], *tiers: dict[str, Any]
) -> dict[str, Any]:
    extra = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.vllm"}
    config = {**extra, "cpu_bytes_to_use": "1MiB", "secondary_tiers": tiers}
    (folder / "kv.json").write_text(json.dumps(config))
    status = main(["check", str(folder / "kv.json"), "--connect", "--json", "-"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == int(bool(found["failed"] or found["refused"]))
    return found


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running("valkey", tmp_path_factory.mktemp("valkey")) as server:
        yield server


def test_a_redis_server_is_tried_and_keeps_nothing(
    valkey: RedisServer, connect: Callable[..., dict[str, Any]]
) -> None:
    found = connect({"type": "redis", "url": valkey.url})
    assert "a key was stored, loaded and removed" in found["noted"][0]
    assert valkey.ask("KEYS", "*") == []


def test_a_server_that_is_read_only_is_asked_alone(
    valkey: RedisServer, connect: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    valkey.ask("ACL", "SETUSER", "reader", "on", f">{SECRET}", "~*", "+exists", "+get", "+ping")
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", SECRET)
    tier = {"type": "redis", "url": valkey.url, "username": "reader", "read_only": True}
    found = connect(tier | {"password_env": "KVTIER_TEST_PASSWORD"})
    assert "a key was looked up" in found["noted"][0]
    assert valkey.ask("KEYS", "*") == []


@pytest.mark.parametrize(
    ("rights", "password", "parts"),
    [
        (RIGHTS, "another", ("logging in failed", "password_file")),
        (RIGHTS[:1], SECRET, ("looking a key up failed", "NoPermission", "~kvtier:*", "+exists")),
        (("+get", "+exists"), SECRET, ("storing one failed", "'set'", "ACL SETUSER kv")),
        (("+set", "+exists"), SECRET, ("loading it failed", "'get'", "+get")),
        (RIGHTS[:3], SECRET, ("removing it failed", "'unlink'", "+unlink")),
    ],
)
def test_the_right_that_a_redis_user_lacks_is_named(
    rights: tuple[str, ...],
    password: str,
    parts: tuple[str, ...],
    valkey: RedisServer,
    connect: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_PASSWORD", password)
    valkey.ask("ACL", "SETUSER", "kv", "reset", "on", f">{SECRET}", "~kvtier:*", *rights)
    tier = {"type": "redis", "url": valkey.url, "username": "kv", "password_env": "TEST_PASSWORD"}
    (text,) = connect(tier)["failed"]
    for part in (f"url='{valkey.url}'", *parts):
        assert part in text
    assert password not in text
    assert all(0 <= valkey.ask("TTL", name) <= 60 for name in valkey.ask("KEYS", "*"))


def test_a_full_server_and_one_that_is_not_there_are_named(
    valkey: RedisServer, connect: Callable[..., dict[str, Any]]
) -> None:
    valkey.ask("CONFIG", "SET", "maxmemory", 1)
    (text,) = connect({"type": "redis", "url": valkey.url})["failed"]
    valkey.ask("CONFIG", "SET", "maxmemory", 0)
    assert "storing one failed" in text
    assert "maxmemory-policy to allkeys-lru" in text
    (text,) = connect({"type": "redis", "url": f"redis://{HOST}:{free_port()}"})["failed"]
    assert "reaching it failed" in text
    assert "Start the server" in text


def test_a_bucket_is_tried_and_keeps_nothing(connect: Callable[..., dict[str, Any]]) -> None:
    set_credentials()
    with moto_server() as server:
        tier = {"type": "s3", **options_for(server.endpoint, "p")}
        found = connect(tier)
        assert "an object was stored, loaded and removed" in found["noted"][0]
        bucket = tier["url"].split("/")[2]
        assert "Contents" not in client_for(server.endpoint).list_objects_v2(Bucket=bucket)
        (text,) = connect({**tier, "url": "s3://no-such-bucket/p"})["failed"]
    assert "NoSuchBucket" in text
    assert "Create the bucket" in text


@pytest.mark.parametrize(
    ("fault", "methods", "parts"),
    [
        (Fault.DENIED, "HEAD", ("looking for an object failed (403", "s3:ListBucket")),
        (Fault.DENIED, "PUT", ("storing one failed (403 AccessDenied)", "s3:PutObject")),
        (Fault.DENIED, "GET", ("loading it failed (403 AccessDenied)", "s3:GetObject")),
        (Fault.SHORTENED, "GET", ("loading it failed", "See to the server")),
        (Fault.QUOTA, "PUT", ("storing one failed (403 QuotaExceeded)", "quota")),
    ],
)
def test_the_right_that_a_key_of_a_bucket_lacks_is_named(
    fault: Fault, methods: str, parts: tuple[str, ...], connect: Callable[..., dict[str, Any]]
) -> None:
    set_credentials()
    with fault_server() as (server, endpoint):
        server.misbehave(fault, methods)
        (text,) = connect({"type": "s3", **options_for(endpoint, "p")})["failed"]
        for part in parts:
            assert part in text
        assert server.objects == {}


@pytest.mark.slow  # a master and a process that owns memory are started
def test_a_mooncake_store_is_tried_and_keeps_nothing(
    tmp_path: Path, connect: Callable[..., dict[str, Any]]
) -> None:
    with mooncake_server.running(tmp_path) as cluster:
        found = connect({"type": "mooncake", "master": cluster.address})
        assert "an object was stored, loaded and removed" in found["noted"][0]
        assert cluster.master.count("master_key_count") == 0
        cluster.owner.kill()
    (text,) = connect({"type": "mooncake", "master": cluster.address})["failed"]
    assert "reaching the master failed" in text
    assert "Start the master" in text


def test_a_folder_is_written_to_and_keeps_nothing(
    tmp_path: Path, connect: Callable[..., dict[str, Any]]
) -> None:
    folders = tmp_path / "fs", tmp_path / "disk"
    tiers = (
        {"type": "fs", "root_dir": str(folders[0])},
        {"type": "disk", "path": str(folders[1]), "capacity_bytes": "16MiB"},
    )
    assert all("is not there yet" in text for text in connect(*tiers)["noted"])
    for folder in folders:
        folder.mkdir()
    assert all("was written" in text for text in connect(*tiers)["noted"])
    assert not [path for folder in folders for path in folder.iterdir()]


@needs("fuse")
@pytest.mark.parametrize("on_unusable", ["refuse", "skip"])
@pytest.mark.parametrize("kind", ["fs", "disk"])
@pytest.mark.parametrize("fault", REMEDIES)
def test_a_folder_that_fails_is_refused_if_an_engine_would(
    kind: str, fault: int, on_unusable: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its mount doesn't show the fault, nor does ext4's after an error of its own."""
    key = {"fs": "root_dir", "disk": "path"}[kind]
    with fuse_folder(tmp_path) as folder:
        tier: dict[str, Any] = {"type": kind, key: str(folder.path), "on_unusable": on_unusable}
        tier |= {"capacity_bytes": "16MiB"} if kind == "disk" else {}
        config = TierConfig.from_mapping(1, tier)
        context = BackendContext(4096, Namespace(facts={}), config.name)
        folder.fail("create", "mkdir", "write", error=fault)
        found = checked(tmp_path, capsys, tier)
        with pytest.raises(StorageUnusable) as refusal:  # when full, only if nothing is there yet
            make_backend(config, context)
    assert REMEDIES[fault] in str(refusal.value)
    (named,) = found["refused"] + found["failed"] + found["warned"]
    where = "refused" if on_unusable == "refuse" else "warned"
    assert found["failed" if fault == errno.ENOSPC else where] == [named]
    assert os.strerror(fault) in named
    assert bool(found["tiers"]) is (fault == errno.ENOSPC)


def test_a_type_without_a_trial_is_said_to_be_untried(
    connect: Callable[..., dict[str, Any]],
) -> None:
    found = connect({"type": "memory", "capacity_bytes": "1MiB"})
    assert "whether 1:memory works: its type has no trial of it" in found["not_checked"]
