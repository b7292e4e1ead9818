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


@pytest.fixture
def moto() -> Iterator[MotoServer]:
    """A server that the test may end."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="module")
def shared_moto() -> Iterator[MotoServer]:
    """A server that the test leaves as it is: each has a prefix of its own."""
    with moto_server() as server:
        yield server


@pytest.fixture
def faulty() -> Iterator[tuple[FaultServer, str]]:
    with fault_server() as both:
        yield both
