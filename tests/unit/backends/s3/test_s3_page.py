"""What *Use S3, GCS or Azure* has a reader run is run, on moto, as the page does."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from kvtier.plugin_api.backend import BackendContext, Namespace
from tests.support.printed import Reader, commands, entries, outputs, printed, shape_of
from tests.support.s3_server import client_for
from tests.support.server_program import free_port
from tests.unit.backends.s3._s3 import BLOCK_BYTES, open_s3

if TYPE_CHECKING:
    from pathlib import Path

PAGE = "how-to/use-s3.md"
KEYS = {"access_key_env": "KV_ACCESS_KEY", "secret_key_env": "KV_SECRET_KEY"}


@pytest.mark.anyio
async def test_the_printed_commands_do_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ls`` is printed with Amazon's own address: here it takes the entry, as ``purge`` does."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    reader = Reader(
        tmp_path / "reader",
        {
            "-p 5000": f"-p {port}",
            "http://127.0.0.1:5000": endpoint,
            '"https://rgw.example:7480"': f'"{endpoint}", "allow_http": true',
        },
    )
    start, keys, make_bucket, ls, purge = commands(PAGE)
    server = reader.program(start, port)
    try:
        server.start()
        for command in (keys, make_bucket):
            reader.run(command)
        reader.environment.update(dict.fromkeys(KEYS.values(), "test"))
        for tier in entries(PAGE):
            reader.configuration(tier)
            said = reader.run("kvtier check kv.json --connect")
            assert "its bucket was reached; an object was stored, loaded and removed" in said

        for name, value in reader.environment.items():
            monkeypatch.setenv(name, value)
        for kv_dtype, count in (("torch.bfloat16", 3), ("fp8", 2)):
            facts = Namespace({"model_name": "org/my-model", "kv_dtype": kv_dtype})
            context = BackendContext(BLOCK_BYTES, facts, "1:s3")
            async with open_s3(endpoint, "", context, url="s3://kv-cache/prod", **KEYS) as s3:
                await s3.store(*range(count))
        entry = re.search(r"'\{.*\}'", purge)
        assert entry
        listed = reader.run(ls.replace("s3://kv-cache/prod", entry[0]))
        shown = outputs(PAGE, "ls s3:")[0].replace("/prod\n", f"/prod at {endpoint}\n")
        assert shape_of(listed) == shape_of(shown)
        assert "removed: 0 blocks" in reader.run(purge)  # none is as old as that
        assert "removed: 5 blocks" in reader.run(purge.replace("14d", "0s"))

        (rules,) = (json.loads(text) for text in printed(PAGE, "json") if "Rules" in text)
        client_for(endpoint).put_bucket_lifecycle_configuration(
            Bucket="kv-cache", LifecycleConfiguration=rules
        )
    finally:
        server.kill()
    reader.check_all_is_used()
