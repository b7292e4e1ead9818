"""A process that ends right after a call of the library has its own exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server_program import HOST, free_port

REPOSITORY = Path(__file__).parents[4]
RUNS = 24
"""Without a remedy, one run in five is aborted."""

ASKS_ONCE = """
import sys
sys.path[:0] = [".", "backends"]
import asyncio
from functools import partial
from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier_backends.s3 import s3_options
from kvtier_backends.s3.client import Client, make_store

options = {"url": "s3://bucket/p", "endpoint": sys.argv[1], "allow_http": True}
options |= {"access_key_env": "PATH", "secret_key_env": "PATH"}
given, reader = s3_options.read_options(options, BackendContext(1, Namespace({}), "s3"))
credentials = s3_options.credentials_of(given, reader)
address = s3_options.address_of(given, reader)
client = Client(partial(make_store, given, address, credentials, ""))
try:
    asyncio.run(client.length("name"))
except StoreFault:
    sys.exit(7)
"""


@pytest.mark.long  # a race, shown by many processes
def test_a_process_ends_with_its_own_status_right_after_a_call() -> None:
    """As ``kvtier ls`` does over a server that is gone."""
    command = [sys.executable, "-c", ASKS_ONCE, f"http://{HOST}:{free_port()}"]
    runs = [
        subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        for _ in range(RUNS)
    ]
    assert [run.returncode for run in runs] == [7] * RUNS, runs[-1].stderr
