"""A process that ends right after a call of the library, or in one, has its own exit status.

The library's thread wants the lock of the interpreter here until the process ends: what happens
once in some runs happens in each.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import obstore
import pytest
from obstore.store import MemoryStore

from kvtier_backends.s3.library_threads import THREADS
from tests.support.patience import PATIENCE_S, until_true
from tests.support.s3_fault_server import Fault
from tests.support.server_program import HOST, free_port

if TYPE_CHECKING:
    from tests.support.s3_fault_server import FaultServer

Faulty = tuple["FaultServer", str]

REPOSITORY = Path(__file__).parents[4]

CLIENT = """
import sys
sys.path[:0] = [".", "backends"]
import asyncio, atexit, threading, time
from contextlib import suppress
from functools import partial
from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import BackendContext, Namespace

@atexit.register  # so it runs behind what the next imports register
def tell_what_is_left():
    print(*THREADS._calls, sep="", end="", file=sys.stderr)

from kvtier_backends.s3 import s3_options
from kvtier_backends.s3.client import S3Client, make_store
from kvtier_backends.s3.s3_options import credentials_of
from kvtier_backends.s3.library_threads import THREADS

def want_the_lock():
    while threading.current_thread() is not threading.main_thread() and not THREADS.is_ending:
        time.sleep(0)

class Future(asyncio.Future):
    def cancelled(self):
        is_cancelled = super().cancelled()
        if is_cancelled:
            want_the_lock()
        return is_cancelled

class Loop(asyncio.SelectorEventLoop):
    def create_future(self):
        return Future(loop=self)

    def call_soon_threadsafe(self, *given, **named):
        handle = super().call_soon_threadsafe(*given, **named)
        want_the_lock()
        return handle

options = {"url": "s3://bucket/p", "endpoint": sys.argv[1], "allow_http": True}
options |= {"access_key_env": "PATH", "secret_key_env": "PATH"}
given, reader = s3_options.read_options(options, BackendContext(1, Namespace({}), "s3"))
credentials = credentials_of(given, reader)
address = s3_options.address_of(given, reader)
client = S3Client(partial(make_store, given, address, where=""), credentials)
"""
ENDS_AFTER_A_CALL = f"""{CLIENT}
with asyncio.Runner(loop_factory=Loop) as runner, suppress(StoreFault):
    runner.run(client.length("name"))
sys.exit(7)
"""
CANCELS_A_CALL = f"""{CLIENT}
async def give_up():
    call = asyncio.create_task(client.length("name"))
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), call.cancel)
    await call

with asyncio.Runner(loop_factory=Loop) as runner, suppress(asyncio.CancelledError):
    runner.run(give_up())
sys.exit(7)
"""
ENDS_WITHIN_A_CALL = f"""{CLIENT}
async def call_again():
    while True:
        with suppress(asyncio.CancelledError, StoreFault):
            await client.length("name")
        await asyncio.sleep(0)

threading.Thread(target=lambda: asyncio.run(call_again()), daemon=True).start()
sys.stdin.readline()
sys.exit(7)
"""


def test_a_process_ends_with_its_own_status_right_after_a_call() -> None:
    """As ``kvtier ls`` does over a server that is gone."""
    run = subprocess.run(
        [sys.executable, "-c", ENDS_AFTER_A_CALL, f"http://{HOST}:{free_port()}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (7, "")


@pytest.mark.parametrize("program", [CANCELS_A_CALL, ENDS_WITHIN_A_CALL], ids=["cancels", "within"])
def test_a_process_ends_with_its_own_status_though_its_server_hangs(
    program: str, faulty: Faulty
) -> None:
    """As on Ctrl-C, and as an engine does that does not close its tiers."""
    server, endpoint = faulty
    server.misbehave_always(Fault.HANG)
    with subprocess.Popen(
        [sys.executable, "-c", program, endpoint],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert server.is_hanging.wait(PATIENCE_S)
        _, stderr = process.communicate("it hangs\n", timeout=PATIENCE_S)
    assert (process.returncode, stderr) == (7, "")


@pytest.mark.anyio
async def test_a_call_that_has_ended_is_not_kept() -> None:
    """It holds what it has brought, which may be a block: nothing waits for a collection here."""
    store = MemoryStore()
    await obstore.put_async(store, "name", b"block")
    gc.disable()
    try:
        call: Any = THREADS.watch(obstore.get_async(store, "name"))
        assert await (await call).bytes_async() == b"block"
        kept = ref(call)
        del call

        def is_gone() -> bool:
            MemoryStore()  # what a library's thread drops without the lock goes with its next call
            return kept() is None

        await until_true(is_gone)
    finally:
        gc.enable()
