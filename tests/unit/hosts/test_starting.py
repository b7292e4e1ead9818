"""What backends may do while an engine starts, and what is said when they can't be made."""

from __future__ import annotations

import contextvars
import errno
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.core import wire
from kvtier.errors import ConfigError, StorageUnusable, StoreFault
from kvtier.hosts.choose import make_host
from kvtier.hosts.thread_host import TierThread
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.settings import plugins
from kvtier.settings.runtime_config import TierConfig
from kvtier_backends.memory import MemoryBackend
from tests.support.mailboxes import KeptMessages
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


CONTEXT = BackendContext(8, Namespace({}), "1:theirs")
SOME_VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("some variable")


class Theirs(MemoryBackend):
    """A third party's: does what the test says while it is made."""

    while_made: Callable[[], None] = staticmethod(lambda: None)
    traits_made: Mapping[str, Any] = {}

    @classmethod
    def from_options(cls, _options: Mapping[str, Any], context: BackendContext) -> Theirs:
        cls.while_made()
        made = cls(context, 8)
        made.traits = replace(made.traits, **cls.traits_made)
        return made


def host_of(
    monkeypatch: pytest.MonkeyPatch, while_made: Callable[[], None], **options: Any
) -> tuple[TierThread, KeptMessages]:
    monkeypatch.setattr(Theirs, "while_made", staticmethod(while_made))
    real = plugins._find

    def find(group: str, name: str, *others: Any, **more: Any) -> Any:
        return Theirs if name == "theirs" else real(group, name, *others, **more)

    monkeypatch.setattr(plugins, "_find", find)
    link = KeptMessages()
    apart = {"may_be_request_scoped": options.pop("may_be_request_scoped", True)}
    tier = TierConfig.from_mapping(
        1, {"type": "theirs", "isolation": "thread", "eviction_policy": "lru"} | options
    )
    tier = replace(tier, **apart)
    host = make_host(tier, CONTEXT, SlotMemory.anonymous(8, 8), link, messages_max=4)
    assert isinstance(host, TierThread)
    return host, link


def raising(error: Exception, cause: Exception | None = None) -> Callable[[], None]:
    def raise_it() -> None:
        raise error from cause

    return raise_it


IO_ERROR = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    "call",
    [
        raising(IO_ERROR),
        raising(ConnectionRefusedError("nobody is there")),
        raising(StoreFault("no answer")),
        raising(ConfigError("address='x' does not answer."), IO_ERROR),
        raising(ConfigError("address='x' does not answer."), StoreFault("no answer")),
    ],
)
def test_trouble_of_the_storage_is_a_refusal_or_a_tier_that_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]
) -> None:
    with pytest.raises(StorageUnusable, match=r"Or set on_unusable='skip' for this"):
        host_of(monkeypatch, call)
    host, _ = host_of(monkeypatch, call, on_unusable="skip")
    assert host.traits is None
    assert host.close(0.0)


@pytest.mark.parametrize(
    "call",
    [
        raising(ConfigError("address=7 must be a text.")),
        raising(ConfigError("path='x' is no folder."), NotADirectoryError(errno.ENOTDIR, "no")),
        raising(TypeError("a bug of theirs")),
    ],
)
def test_a_mistake_is_refused_whatever_the_tier_says_of_trouble(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]
) -> None:
    with pytest.raises((ConfigError, TypeError)) as refusal:
        host_of(monkeypatch, call, on_unusable="skip")
    assert not isinstance(refusal.value, StorageUnusable)


def test_an_unknown_policy_is_refused_though_the_storage_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It once kept the tier from opening for ever, when its storage was back."""
    settings = {"eviction_policy": "nonesuch", "on_unusable": "skip"}
    with pytest.raises(ConfigError, match="eviction_policy='nonesuch'"):
        host_of(monkeypatch, raising(IO_ERROR), **settings)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_of_no_block_is_refused(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    """It divided by zero in the primary tier's actor, which ended all caching."""
    monkeypatch.setattr(Theirs, "traits_made", {"capacity_blocks": capacity})
    says = f"secondary tier 1:theirs: it has room for capacity_blocks={capacity}. Give it more"
    with pytest.raises(ConfigError, match=says):
        host_of(monkeypatch, lambda: None)


def test_a_request_scoped_backend_is_refused_as_soon_as_it_is_known_where_it_is_of_no_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind vLLM's own tiering; it may be made only after the start, if its storage is down."""
    monkeypatch.setattr(Theirs, "traits_made", {"capacity_blocks": None, "request_scoped": True})
    host, _ = host_of(monkeypatch, lambda: None)
    assert host.close(0.0)
    refused = {"may_be_request_scoped": False}
    with pytest.raises(ConfigError, match="it is request-scoped, which vLLM's own tiering does"):
        host_of(monkeypatch, lambda: None, **refused)
    storage = [raising(IO_ERROR)]
    host, link = host_of(
        monkeypatch, lambda: storage.pop()() if storage else None, on_unusable="skip", **refused
    )
    host.start()
    while not any("request-scoped" in (host._life.reason or "") for _ in link.messages):
        assert host._thread.is_alive()
    assert host.close(PATIENCE_S)


def test_a_backend_is_made_once_and_in_the_context_of_the_one_who_starts_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs in a thread of its own; what a third party finds by context variables is there."""
    seen: list[str] = []
    SOME_VARIABLE.set("mine")
    host, _ = host_of(monkeypatch, lambda: seen.append(SOME_VARIABLE.get()))
    assert host.close(0.0)
    assert seen == ["mine"]


def test_a_backend_that_was_late_is_used_and_no_second_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that hangs keeps one thread, not one more with each try."""
    may_go_on = threading.Event()
    made: list[int] = []

    def late() -> None:
        made.append(1)
        may_go_on.wait()

    host, link = host_of(monkeypatch, late, start_timeout_s=0.01, on_unusable="skip")
    host.start()
    may_go_on.set()
    while not any(isinstance(message, wire.TierRestarted) for message in link.messages):
        assert host._thread.is_alive()
    assert host.close(PATIENCE_S)
    assert made == [1]
    assert [type(message) for message in link.messages[:2]] == [wire.TierBroke, wire.TierFenced]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("start_timeout_s", 0, "must be above 0 and at most 3600"),
        ("start_timeout_s", 3601, "must be above 0 and at most 3600"),
        ("on_unusable", "ignore", "must be one of refuse, skip"),
    ],
)
def test_the_keys_are_checked(key: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"secondary_tiers\[0\] \(fs\): {key}={value!r} {says}"):
        TierConfig.from_mapping(1, {"type": "fs", key: value})
