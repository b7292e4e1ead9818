"""The product's default limits, made patient: for tests that are not about a limit.

A sound tier of a busy machine misses a deadline that serves users well. What a test is about
is what comes, not when; one that is about a limit sets it. ``tests/house`` looks for those that
rely on a default.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import pytest

from kvtier.core import tier_host
from kvtier.engine.link import relays
from kvtier.engine.primary import primary_tier
from kvtier.hosts import thread_host
from kvtier.plugin_api.option_fields import options_of
from kvtier.settings.runtime_config import RuntimeConfig, TierConfig
from kvtier.tier import cell
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

TIER_LIMITS: Final = ("probe_timeout_s", "promote_timeout_s", "store_timeout_s", "start_timeout_s")
RUNTIME_LIMITS: Final = ("close_timeout_s", "lease_timeout_s")
#: What a cell's end leaves to a backend and to a host, where it runs in this process.
CONSTANTS: Final = ((cell, "CLOSE_BACKEND_S"), (thread_host, "ABANDON_S"), (tier_host, "ABANDON_S"))
#: How often policies of eviction are told the time. Else what goes depends on how busy the machine
#: is; told none, they go by the blocks that come.
POLICY_TIMES: Final = ((primary_tier, "POLICY_TIME_S"), (relays, "POLICY_TIME_S"))


@contextmanager
def patient_limits() -> Iterator[None]:
    """Have every limit that is not given be ``PATIENCE_S``, in this process and its forks.

    And time stands still for policies of eviction.
    """
    with ExitStack() as stack:
        for owner, names in ((TierConfig, TIER_LIMITS), (RuntimeConfig, RUNTIME_LIMITS)):
            for name in names:
                stack.enter_context(_patient(owner, name))
        for module, name in CONSTANTS:
            stack.enter_context(patch.object(module, name, PATIENCE_S))
        for module, name in POLICY_TIMES:
            stack.enter_context(patch.object(module, name, math.inf))
        yield


@pytest.fixture(autouse=True)
def _patient_limits() -> Iterator[None]:
    """For a folder's ``conftest.py`` to import."""
    with patient_limits():
        yield


@contextmanager
def _patient(owner: Any, name: str) -> Iterator[None]:
    """A default stands twice: where a configuration is read, and where the class is called."""
    option = options_of(owner)[name]
    made, read = owner.__init__.__defaults__, option.default
    names = [each.name for each in fields(owner)][-len(made) :]
    patient = [
        PATIENCE_S if each == name else value for each, value in zip(names, made, strict=True)
    ]
    owner.__init__.__defaults__ = tuple(patient)
    object.__setattr__(option, "default", PATIENCE_S)
    try:
        yield
    finally:
        owner.__init__.__defaults__ = made
        object.__setattr__(option, "default", read)
