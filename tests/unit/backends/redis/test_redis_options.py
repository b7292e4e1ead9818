"""Bad options are refused with key, value and remedy, and no refusal shows a password."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier_backends.redis import RedisBackend
from kvtier_backends.redis.redis_options import Address, parse_url, read_options
from tests.unit.backends.redis._redis import CONTEXT, make_redis

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

URL = "redis://kv1"
TLS = "rediss://kv1"
SECRET = "hunter2"

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "url is missing"),
    ({"url": "kv1:6379"}, "must begin with one of redis"),
    ({"url": "http://kv1"}, "must begin with one of redis"),
    ({"url": "redis://"}, "must name hosts"),
    ({"url": "redis://kv1:0"}, "must name hosts"),
    ({"url": "redis://kv1:port"}, "must name hosts"),
    ({"url": "redis://kv1,,kv2", "mode": "cluster"}, "must name hosts"),
    ({"url": "redis://kv1/2"}, "such as db"),
    ({"url": "unix://run/valkey.sock"}, "full path"),
    ({"url": "redis://kv1,kv2"}, "several servers"),
    ({"url": URL, "mode": "sentinel"}, "needs sentinel_master"),
    ({"url": URL, "sentinel_master": "kv"}, "mode 'sentinel' alone"),
    ({"url": URL, "mode": "cluster", "db": 1}, "does not exist in a cluster"),
    ({"url": "unix:///a", "mode": "cluster"}, "needs mode 'standalone'"),
    ({"url": URL, "key_prefix": "{kv}"}, "key_prefix='{kv}'"),
    ({"url": URL, "username": "kv"}, "needs a password"),
    ({"url": URL, "password_env": "NO_SUCH_NAME"}, "password_env='NO_SUCH_NAME' gives no password"),
    ({"url": URL, "password_file": "/no/such/file"}, "No such file"),
    ({"url": URL, "password_file": "/a", "password_env": "B"}, "excludes password_file"),
    ({"url": URL, "tls_ca_file": "/a"}, "begins with rediss://"),
    ({"url": TLS, "tls_cert_file": "/a"}, "needs tls_key_file too"),
    ({"url": TLS, "tls_key_file": "/a"}, "needs tls_cert_file too"),
    ({"url": TLS, "tls_ca_file": "/no/such/file"}, "tls_ca_file='/no/such/file' can't be used"),
    ({"url": URL, "connections_max": 1}, "must be at least 2"),
    ({"url": URL, "ttl": 5}, "did you mean 'ttl_s'"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_a_bad_option_is_refused_with_its_remedy(options: dict[str, Any], said: str) -> None:
    """``kvtier check`` says the same."""
    for ask in (RedisBackend.from_options, RedisBackend.check_options):
        with pytest.raises(ConfigError) as refused:
            ask(options, CONTEXT)
        assert said in str(refused.value)
        assert "1:redis" in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {"url": f"redis://:{SECRET}@kv1"},
        {"url": f"redis://user:{SECRET}@kv1:6379/0"},
        {"url": f"redis://kv1?password={SECRET}"},
        {"url": f"kv1:{SECRET}@6379"},
        {"url": URL, "password": SECRET},
        {"url": URL, "password_env": SECRET},
        {"url": URL, "password_file": SECRET},
    ],
)
def test_a_secret_in_the_configuration_is_refused_and_not_shown(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        make_redis(**options)
    assert SECRET not in str(refused.value)


def test_a_password_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    monkeypatch.setenv("KV_PASSWORD", SECRET)
    for named in ({"password_file": str(file)}, {"password_env": "KV_PASSWORD"}):
        _, given = read_options({"url": URL, **named}, CONTEXT)
        assert given.credentials.password() == SECRET
        assert SECRET not in repr(given)


BAD_FILES: dict[str, Callable[[Path], object]] = {
    "chmod 600": lambda file: (file.write_text(SECRET), file.chmod(0o644)),
    "UTF-8": lambda file: (file.write_bytes(SECRET.encode() + b"\xff"), file.chmod(0o600)),
    "empty": lambda file: os.mkfifo(file, 0o600),  # which keeps no engine from starting
}
"""By what the refusal says."""


@pytest.mark.parametrize("said", BAD_FILES)
def test_a_bad_password_file_is_refused_and_not_shown(tmp_path: Path, said: str) -> None:
    BAD_FILES[said](tmp_path / "password")
    with pytest.raises(ConfigError, match=said) as refused:
        make_redis(URL, password_file=str(tmp_path / "password"))
    assert SECRET not in str(refused.value)


def test_without_its_library_the_refusal_names_its_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "valkey"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(ConfigError, match=r"pip install 'valkey<7,>=6.1'"):
        make_redis(URL)


def test_blocks_larger_than_a_server_takes_are_refused() -> None:
    context = BackendContext(512 << 20, Namespace({}), "1:redis")
    with pytest.raises(ConfigError, match="Lower block_size"):
        make_redis(URL, context)


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("redis://kv1", [Address("kv1", 6379)]),
        ("valkey://kv1:1/", [Address("kv1", 1)]),
        ("redis://b:1,a:2,b:1", [Address("a", 2), Address("b", 1)]),
        ("redis://[::1]:7000", [Address("::1", 7000)]),
        ("redis://KV1", [Address("kv1", 6379)]),
        ("unix:///run/valkey.sock", [Address("", 0, "/run/valkey.sock")]),
    ],
)
def test_a_url_names_servers(url: str, addresses: list[Address]) -> None:
    assert list(parse_url(url, "here", 6379).addresses) == addresses


def test_one_place_has_one_name() -> None:
    """So that two tiers at one place are found, however their addresses are written."""
    nodes = ("redis://b,A:7000", "redis://a:7000,b:6379")
    places = {make_redis(url, mode="cluster").place for url in nodes}
    assert places == {"redis://a:7000,b:6379/0/kvtier"}
    others = [make_redis(URL, **more).place for more in ({}, {"db": 1}, {"key_prefix": "x"})]
    assert len({*others}) == 3
    assert RedisBackend.check_options({"url": URL}, CONTEXT) == others[0]
