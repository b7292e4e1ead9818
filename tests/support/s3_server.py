"""Real S3 servers on loopback, for tests: moto, which keeps all in the memory of its process."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.server_program import HOST, ServerProgram, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ACCESS_KEY = "kvtier-tests"
SECRET_KEY = "kvtier-tests-secret"
BUCKET = "kv-blocks"

_MOTO = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
WSGIRequestHandler.protocol_version = "HTTP/1.1"
app = DomainDispatcherApplication(create_backend_app)
server = make_server("127.0.0.1", int(sys.argv[1]), app, threaded=True)
server.serve_forever()
"""


class MotoServer(ServerProgram):
    """A server that is empty each time it starts, without any bucket."""

    def __init__(self) -> None:
        assert find_spec("moto"), "there is no moto: requirements/dev.txt names all that it needs"
        port = free_port()
        super().__init__([sys.executable, "-c", _MOTO, str(port)], Path(os.devnull), port)

    @property
    def endpoint(self) -> str:
        """Return the server's address."""
        return f"http://{HOST}:{self.port}"

    def make_bucket(self) -> None:
        """Make the bucket of the tests."""
        client_for(self.endpoint).create_bucket(Bucket=BUCKET)


@contextmanager
def moto_server() -> Iterator[MotoServer]:
    """Start a server with one bucket, and end it whatever happens."""
    server = MotoServer()
    try:
        server.start()
        server.make_bucket()
        yield server
    finally:
        server.kill()


def client_for(
    endpoint: str, access: str = ACCESS_KEY, secret: str = SECRET_KEY, *, service: str = "s3"
) -> Any:
    """Return another library's client, to look at what is there and to change it."""
    import boto3

    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=access,
        aws_secret_access_key=secret,
    )


def options_for(endpoint: str, prefix: str, **more: Any) -> dict[str, Any]:
    """Return the options of a tier on such a server. Its credentials are in the environment.

    ``more``: with None for those that are to be left out.
    """
    options = {
        "url": f"s3://{BUCKET}/{prefix}",
        "endpoint": endpoint,
        "allow_http": True,
        "access_key_env": "KVTIER_TEST_ACCESS_KEY",
        "secret_key_env": "KVTIER_TEST_SECRET_KEY",
        **more,
    }
    return {name: value for name, value in options.items() if value is not None}


def set_credentials(access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> None:
    """Put credentials where ``options_for`` has them looked for."""
    os.environ["KVTIER_TEST_ACCESS_KEY"] = access_key
    os.environ["KVTIER_TEST_SECRET_KEY"] = secret_key
