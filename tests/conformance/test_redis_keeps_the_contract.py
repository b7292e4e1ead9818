"""The redis tier passes the shipped suite, on a real Valkey and on a real Redis."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.testing import BACKEND_CHECKS, PERSISTENCE_CHECKS, BackendCheck
from kvtier_backends.redis import RedisBackend
from tests.support.patience import PATIENCE_S
from tests.support.redis_servers import PROGRAMS, Program, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.plugin_api.backend import BackendContext
    from tests.support.redis_servers import RedisServer

PATIENT = dict.fromkeys(("connect_timeout_s", "call_timeout_s"), PATIENCE_S)
KEY_VARIABLE = "KVTIER_TEST_REDIS_KEY"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize(
        "check", BACKEND_CHECKS + PERSISTENCE_CHECKS, ids=lambda check: check.__name__
    ),
]


@pytest.fixture(scope="module", params=PROGRAMS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    program: Program = request.param
    with running(program, tmp_path_factory.mktemp(program)) as server:
        yield server


def redis(options: dict[str, Any], context: BackendContext) -> RedisBackend:
    return RedisBackend.from_options({"connections_max": 4, **PATIENT, **options}, context)


async def test_redis_keeps_the_contract(check: BackendCheck, server: RedisServer) -> None:
    await check(partial(redis, {"url": server.url}))


@pytest.mark.parametrize("server", ["valkey"], indirect=True)  # the server sees no difference
@pytest.mark.parametrize("kind", ["auth_key_env", "encryption_key_env"])
async def test_redis_with_keys_keeps_the_contract(
    check: BackendCheck, server: RedisServer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    await check(partial(redis, {"url": server.url, kind: KEY_VARIABLE}))
