"""vLLM's offloading interface, as installed (0.32) and as it will be (0.33)."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import pytest
import vllm
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker

from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm.memory.cpu_worker import CPUPlatformWorker
from kvtier.vllm.scheduler.manager import KVTierManager

if TYPE_CHECKING:
    from collections.abc import Iterator

PAIRS = [
    (OffloadingManager, KVTierManager),
    (OffloadingSpec, KVTierOffloadingSpec),
    (OffloadingWorker, CPUPlatformWorker),
]
#: What 0.33 adds, and how it is called there: positional arguments after self.
ADDED_IN_0_33 = [
    (KVTierManager, "lock", None),
    (KVTierManager, "on_reset_flushed", 0),
    (KVTierManager, "config_info", 0),
    (KVTierOffloadingSpec, "config_info_keys", 1),
    (CPUPlatformWorker, "submit_load", 4),
]


def test_it_is_the_release_that_was_asked_for() -> None:
    """The Makefile puts the one before the other, and says which."""
    asked = os.environ.get("KVTIER_TEST_VLLM", "0.32")
    assert vllm.__version__.startswith(f"{asked}."), vllm.__file__


def public(base: type) -> Iterator[tuple[str, Any]]:
    for name, member in inspect.getmembers(base):
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            yield name, member


@pytest.mark.parametrize(("base", "ours"), PAIRS)
def test_nothing_abstract_is_left(base: type, ours: type) -> None:
    """An engine would find out when it builds the object."""
    assert inspect.isabstract(base)
    assert not inspect.isabstract(ours)
    assert issubclass(ours, base)


@pytest.mark.parametrize(
    ("base", "ours", "name"),
    [(base, ours, name) for base, ours in PAIRS for name, _ in public(base)],
)
def test_every_public_method_is_provided_with_a_signature_that_fits(
    base: type, ours: type, name: str
) -> None:
    """A default of vLLM's that is taken unseen is a feature that silently is none."""
    provided = getattr(ours, name)
    provider = next(each for each in ours.__mro__ if name in vars(each))
    assert provider is not base, f"{ours.__name__} only inherits {name}"
    if not callable(provided):
        return
    theirs = inspect.signature(getattr(base, name)).parameters
    mine = inspect.signature(provided).parameters
    for parameter in theirs.values():
        assert parameter.name in mine, f"{ours.__name__}.{name} lacks {parameter.name}"
        assert mine[parameter.name].kind is parameter.kind
        has_default = parameter.default is not inspect.Parameter.empty
        assert not has_default or mine[parameter.name].default == parameter.default
    order = [each for each in mine if each in theirs]
    assert order == list(theirs)
    for extra in set(mine) - set(theirs):
        assert mine[extra].default is not inspect.Parameter.empty


@pytest.mark.parametrize(("ours", "name", "arguments"), ADDED_IN_0_33)
def test_what_0_33_adds_is_there(ours: type, name: str, arguments: int | None) -> None:
    """The adapter serves both versions; the installed one can't tell that it does."""
    found = inspect.getattr_static(ours, name)
    if arguments is None:
        assert isinstance(found, property)
        return
    signature = inspect.signature(getattr(ours, name))
    takes_self = not isinstance(found, classmethod)
    signature.bind(*[None] * (arguments + takes_self))


def test_submit_load_takes_expedited_by_name_and_without() -> None:
    """0.32 doesn't pass it; 0.33 does, by keyword."""
    parameter = inspect.signature(CPUPlatformWorker.submit_load).parameters["expedited"]
    assert parameter.default is False
    assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
