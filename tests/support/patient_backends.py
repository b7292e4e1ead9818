"""The backends' own limits, made patient: for tests that are not about one of them.

``tests/support/patient_limits.py`` does the same for the layers above. A test of a limit sets it.
What a backend does by itself every second happens here when a test says so, by ``tick``: beside
the test's own steps it would be a race. Where it must go on by itself, a test sets its period.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

import pytest

from kvtier.plugin_api.option_fields import options_of
from kvtier.testing import _workbench
from kvtier_backends.disk import backend as disk
from kvtier_backends.disk.folder import claim
from kvtier_backends.disk.log import region_reclaim
from kvtier_backends.disk.offline import purge_requests, purging
from kvtier_backends.fs import backend as fs
from kvtier_backends.fs.bound import folder_bound
from kvtier_backends.fs.offline import evicting
from kvtier_backends.mooncake import backend as mooncake
from kvtier_backends.mooncake.mooncake_options import MooncakeOptions
from kvtier_backends.redis import servers
from kvtier_backends.redis.redis_options import RedisOptions
from kvtier_backends.s3 import client as s3_client
from kvtier_backends.s3 import connection as s3_connection
from kvtier_backends.s3.s3_options import S3Options
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

NEVER_S: Final = 1e6
"""A period that does not come round while a test runs."""

PERIODS: Final = ((disk, "TICK_S"), (servers, "CHECK_S"))
LIMITS: Final = (
    (disk, "CLOSE_TIMEOUT_S_MAX"),
    (claim, "LOCK_WAIT_S_MAX"),
    (region_reclaim, "READERS_WAIT_S_MAX"),
    (purge_requests, "ACCEPTED_WITHIN_S_MAX"),
    (purging, "LOADS_END_S_MAX"),
    (purging, "QUIET_WAIT_S_MAX"),
    (fs, "_CLOSE_TIMEOUT_S_MAX"),
    (folder_bound, "ROOM_WAIT_S_MAX"),
    (folder_bound, "ROUND_ENDS_S_MAX"),
    (evicting, "_ANSWER_S_MAX"),
    (mooncake, "_CLOSE_TIMEOUT_S_MAX"),
    (s3_client, "CONNECT_TIMEOUT_S_MAX"),
    (s3_connection, "CHECK_TIMEOUT_S_MAX"),
    (_workbench, "CLOSE_TIMEOUT_S_MAX"),
    (_workbench, "CHECK_TIMEOUT_S_MAX"),
)
OPTIONS: Final = (
    (MooncakeOptions, "timeout_s"),
    (RedisOptions, "connect_timeout_s"),
    (RedisOptions, "call_timeout_s"),
    (S3Options, "request_timeout_s"),
)


@contextmanager
def patient_backends() -> Iterator[None]:
    """Have every limit be ``PATIENCE_S`` that no test sets, in this process and its forks."""
    with ExitStack() as stack:
        for module, name in PERIODS:
            stack.enter_context(patch.object(module, name, NEVER_S))
        for module, name in LIMITS:
            stack.enter_context(patch.object(module, name, PATIENCE_S))
        for options, name in OPTIONS:
            stack.enter_context(_default(options, name))
        yield


@pytest.fixture(autouse=True)
def _patient_backends() -> Iterator[None]:
    """For a folder's ``conftest.py`` to import."""
    with patient_backends():
        yield


@contextmanager
def _default(options: type, name: str) -> Iterator[None]:
    """Give an option another default, for whoever reads a configuration."""
    option = options_of(options)[name]
    before = option.default
    object.__setattr__(option, "default", PATIENCE_S)
    try:
        yield
    finally:
        object.__setattr__(option, "default", before)
