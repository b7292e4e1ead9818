"""Servers for the tests of the s3 backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.s3_fault_server import fault_server
from tests.support.s3_server import moto_server, set_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.s3_fault_server import FaultServer
    from tests.support.s3_server import MotoServer


@pytest.fixture(autouse=True)
def _credentials() -> None:
    set_credentials()


@pytest.fixture(scope="session")
def shared_moto() -> Iterator[MotoServer]:
    """A server that the test leaves as it is: each has a prefix of its own."""
    set_credentials()
    with moto_server() as server:
        yield server


@pytest.fixture
def moto(shared_moto: MotoServer) -> Iterator[MotoServer]:
    """The same one, which this test may end. It is empty then: a start takes seconds."""
    yield shared_moto
    if shared_moto._process is None:
        shared_moto.start()
        shared_moto.make_bucket()


@pytest.fixture
def faulty() -> Iterator[tuple[FaultServer, str]]:
    with fault_server() as both:
        yield both
