"""What *Keep blocks in a Mooncake store* has a reader run is run, on loopback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.mooncake_server import HOST, program_path
from tests.support.printed import Reader, commands, entries
from tests.support.server_program import free_port

if TYPE_CHECKING:
    from pathlib import Path

PAGE = "how-to/use-mooncake.md"


def test_the_printed_commands_start_a_store_that_an_engine_can_use(tmp_path: Path) -> None:
    """Its own memory, and an SSD behind it, too: the same master may move blocks there."""
    ports = [free_port() for _ in range(3)]
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    reader = Reader(
        tmp_path / "reader",
        {
            "mooncake_master ": f"{program_path('mooncake_master')} --metrics_port={ports[0]} ",
            "mooncake_client ": f"{program_path('mooncake_client')} --port={ports[1]} ",
            "--rpc_port=50051": f"--rpc_port={ports[2]}",
            "10.0.0.1:50051": f"{HOST}:{ports[2]}",
            "10.0.0.1": HOST,
            "10.0.0.2": HOST,
            "64GB": "64MB",
            "/nvme/mooncake": str(ssd),
        },
    )
    _, _, start_master, give_memory = commands(PAGE)
    master = reader.program(f"{start_master} --enable_offload=true", ports[2])
    owner = reader.program(give_memory, ports[1])
    try:
        master.start()
        owner.start()
        for tier in entries(PAGE):
            reader.configuration(tier)
            said = reader.run("kvtier check kv.json --connect")
            assert "its master was reached; an object was stored, loaded and removed" in said
    finally:
        owner.kill()
        master.kill()
    reader.check_all_is_used()
