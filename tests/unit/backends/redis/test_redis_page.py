"""What *Use Redis or Valkey* has a reader run is run, on servers of the test's."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import pytest
import valkey

from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier.tools.cli.exit_status import BAD_INPUT
from tests.support.printed import Reader, commands, entries, outputs, printed, shape_of
from tests.support.redis_servers import HOST, free_port, program_path
from tests.unit.backends.redis._redis import BLOCK_BYTES, open_redis

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.redis_servers import Cluster, RedisServer

PAGE = "how-to/use-redis.md"
PASSWORD = "secret"
FILE = "/etc/kvtier/redis-password"


def password_file(tmp_path: Path) -> str:
    file = tmp_path / "redis-password"
    file.write_text(PASSWORD)
    file.chmod(0o600)
    return str(file)


async def store(url: str, count: int, kv_dtype: str, **options: Any) -> str:
    """Store blocks of the page's model; return the digest in their names."""
    facts = Namespace({"model_name": "org/my-model", "kv_dtype": kv_dtype})
    context = BackendContext(BLOCK_BYTES, facts, "1:redis")
    async with open_redis(url, context, **options) as tier:
        await tier.store(*range(count))
        return tier.name(0).decode().split(":")[1].rpartition("_")[2]


@pytest.mark.anyio
async def test_one_server_is_started_filled_listed_and_purged_as_printed(tmp_path: Path) -> None:
    port = free_port()
    reader = Reader(
        tmp_path / "reader",
        {
            "valkey-server": f"{program_path('valkey')} --port {port} --bind {HOST}",
            "64gb": "64mb",
            "kv1:6379": f"{HOST}:{port}",
        },
    )
    start, ls, purge, _ = commands(PAGE)
    server = reader.program(start, port)
    try:
        server.start()
        reader.configuration(entries(PAGE)[0])
        said = reader.run("kvtier check kv.json --connect")
        assert "its server was reached; a key was stored, loaded and removed" in said

        url = f"redis://{HOST}:{port}"
        kept = await store(url, 3, "torch.bfloat16")
        gone = await store(url, 2, "fp8")
        assert shape_of(reader.run(ls)) == shape_of(reader.here(outputs(PAGE, "ls redis:")[0]))
        reader.run(purge.replace("91b0", gone[:4]))
        left = reader.run(ls)
        assert kept in left
        assert gone not in left
    finally:
        server.kill()
    reader.check_all_is_used()


@pytest.mark.anyio
async def test_the_printed_rights_suffice_and_close_the_server_to_others(
    tmp_path: Path, valkey_server: RedisServer
) -> None:
    address = f"redis://{HOST}:{valkey_server.port}"
    reader = Reader(
        tmp_path / "reader",
        {"rediss://kv1:6380": address, FILE: password_file(tmp_path), ">...": f">{PASSWORD}"},
    )
    rights = [line for text in printed(PAGE, "text") for line in text.splitlines() if "ACL" in line]
    with valkey.Valkey(host=HOST, port=valkey_server.port) as administrator:

        def give(line: str) -> None:
            administrator.execute_command(*shlex.split(reader.here(line)))

        for line in rights:
            give(line)
        entry = entries(PAGE)[-1]
        del entry["tls_ca_file"]
        reader.configuration(entry)
        reader.run("kvtier check kv.json --connect")
        ls = f"kvtier ls '{json.dumps(entry)}'"
        reader.run(ls, status=BAD_INPUT)
        give("ACL SETUSER kvtier +scan +strlen")
        reader.run(ls)
        reader.run(f"kvtier ls {address}", status=BAD_INPUT)
    reader.check_all_is_used()


@pytest.mark.anyio
async def test_a_cluster_is_listed_as_printed(tmp_path: Path, formed: Cluster) -> None:
    nodes = [f"{HOST}:{node.port}" for node in formed.nodes]
    file = password_file(tmp_path)
    reader = Reader(tmp_path / "reader", {"kv1:6379": nodes[0], "kv2:6379": nodes[1], FILE: file})
    for node in formed.nodes:
        node.ask("CONFIG", "SET", "requirepass", PASSWORD)
    await store(formed.url, 3, "fp8", mode="cluster", password_file=file)
    *_, ls = commands(PAGE)
    assert " 3 " in reader.run(ls)
    reader.check_all_is_used()
