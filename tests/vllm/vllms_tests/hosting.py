"""A pytest plugin that runs vLLM's own tests of its tiers on tiers that kvtier hosts.

``make vllm-tests`` runs it over the tests of vLLM's source distribution, which import vLLM's tiers
by their classes. Once a file is imported, a ``HostedTier`` stands there in the place of each
class. It has vLLM's interface, and behind it runs kvtier's whole path both ways: kvtier as a
tier of vLLM's, which stages its blocks, and in it a tier of type ``vllm``, whose thread
runs the real class::

    the test → KVTierSecondaryTier → staging slots → tier cell → HostedBackend → vLLM's class

What kvtier does later, on that thread, the tests expect at once. So a ``HostedTier`` waits: for the
answers of a tier that answers at once, and for jobs when they are asked for. An
attribute that is no part of the interface (``tier._agent``) is the real tier's.

What can't pass is in ``left_out.toml``, each with its reason. It is run all the same: one
that passes is an error, as is one that is not listed and fails.
"""

from __future__ import annotations

import logging
import threading
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar
from unittest.mock import patch

import pytest
import structlog
import vllm
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.obj.manager import ObjectStoreSecondaryTierManager

from kvtier.errors import ConfigError
from kvtier.vllm.hosted import backend
from kvtier.vllm.identity import own_spec
from kvtier.vllm.secondary_tier import KVTierSecondaryTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from vllm.v1.kv_offload.base import RequestOffloadingContext
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

Answer = TypeVar("Answer")
HERE: Final = Path(__file__).parent
TIMEOUTS: Final = ("probe_timeout_s", "promote_timeout_s", "store_timeout_s")

PATIENCE_S: Final = 20.0
"""How long something is waited for that must come."""

PAUSE_S: Final = 0.001
STEP: Final = ScheduleEndContext((), ())
NO_EVENTS: Final = OffloadingKVEventsConfig(
    enable_kv_cache_events=False, self_describing_kv_events=False
)
CONFIG: Final = OffloadingConfig(
    groups=(),
    worker_kv_bytes_per_block=0,
    enable_kv_cache_events=False,
    extra_config={},
    engine_id="vllms-tests",
    model=OffloadingModelConfig(name="test-model", dtype="float32"),
    cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
    parallel=OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    ),
)
BESIDE_THE_TIER: Final = ("enable_kv_events", "locality")
"""Keys of a tier that an entry of kvtier's has beside it."""


def spec_for(given: Any) -> Any:
    """Return a spec with all that kvtier reads; a test's has what its tier reads."""
    config, events = getattr(given, "config", None), getattr(given, "kv_events_config", None)
    chunks = getattr(given, "blocks_per_chunk", 1)
    return SimpleNamespace(
        config=config if isinstance(config, OffloadingConfig) else CONFIG,
        kv_events_config=events if isinstance(events, OffloadingKVEventsConfig) else NO_EVENTS,
        blocks_per_chunk=chunks if isinstance(chunks, int) else 1,
        extra_config={},
    )


def entry_for(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of ``KVTierSecondaryTier`` for one of vLLM's tiers with these options."""
    beside = {key: options[key] for key in BESIDE_THE_TIER if key in options}
    inside = {key: value for key, value in options.items() if key not in beside}
    return {
        "tier": {
            "type": "vllm",
            "tier": {"type": kind, **inside},
            **dict.fromkeys(TIMEOUTS, PATIENCE_S),
            **beside,
        }
    }


class HostedTier(KVTierSecondaryTier):
    """One of vLLM's tiers, hosted by kvtier: for its tests, as if it were the tier itself."""

    kind: ClassVar[str]
    """As vLLM's factory knows it."""

    real: ClassVar[type[SecondaryTierManager]]

    ends_at_once: ClassVar[bool] = False
    """Whether the tier has done a job when its submission returns."""

    built = 0

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        self._hosted: Any = None
        self._contexts: dict[str, ReqContext] = {}
        self._looked_up_by: dict[bytes, str] = {}
        self._results: list[JobResult] = []
        HostedTier.built += 1
        create = SecondaryTierFactory.create_secondary_tier

        def noted(*arguments: Any) -> Any:
            self._hosted = create(*arguments)
            return self._hosted

        with (
            real_classes(),
            patch.object(SecondaryTierFactory, "create_secondary_tier", noted),
            patch.object(own_spec, "engine_facts", lambda *_: {"model": "m"}),
            # A job of a test's is one job of its tier, and not cut up to run in parts.
            patch.object(backend, "_BATCHES_MAX", 1),
        ):
            try:
                super().__init__(
                    spec_for(offloading_spec),
                    primary_kv_view,
                    tier_type,
                    backpressure_detector,
                    **entry_for(self.kind, options),
                    cascade_slots_fraction_max=1.0,
                    on_reset="keep",  # the tests drain a tier to wait for it
                    close_timeout_s=PATIENCE_S,
                )
            except ConfigError as error:
                raise error.__cause__ or error from None
        self.tier_type = tier_type
        assert self.medium is self.real.medium
        assert self.cache_hit_source is self.real.cache_hit_source
        del self.cache_hit_source  # tests change the class's

    def __getattr__(self, name: str) -> Any:
        if name == "_hosted" or self._hosted is None:
            raise AttributeError(name)
        return getattr(self._hosted, name)

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        with real_classes():
            return super().config_info_keys(entry_for(cls.kind, tier_config))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._contexts[req_context.req_id] = req_context
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._contexts.pop(req_context.req_id, None)
        super().on_request_finished(req_context)

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Return the answer that kvtier has in a later step.

        Tests look up for requests that nobody has announced.
        """
        if req_context.req_id not in self._contexts:
            self.on_new_request(req_context)
        self._looked_up_by[key] = req_context.req_id

        def found() -> LookupResult | None:
            result = super(HostedTier, self).lookup(key, req_context)
            if result is not LookupResult.RETRY:
                return result
            self.on_schedule_end(STEP)
            return None

        return wait_for(found) or LookupResult.RETRY

    def submit_store(self, job_metadata: TransferJob) -> None:
        super().submit_store(job_metadata)
        self._submitted_one()

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Submit a load as vLLM's manager does: for the request that looked the blocks up."""
        asked = {self._looked_up_by.get(key) for key in job_metadata.keys}
        if len(asked) == 1 and (context := self._contexts.get(asked.pop() or "")) is not None:
            job_metadata = replace(job_metadata, req_context=context)
        super().submit_load(job_metadata)
        self._submitted_one()

    def _submitted_one(self) -> None:
        if self.ends_at_once:
            self._wait_for_jobs()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._wait_for_jobs()
        results, self._results = self._results, []
        return results

    def _wait_for_jobs(self) -> None:
        def are_done() -> bool:
            self._results += super(HostedTier, self).get_finished_jobs()
            return not self._submitted

        wait_for(are_done)

    def has_pending_work(self) -> bool:
        return bool(self._results) or super().has_pending_work()


def hosted(kind: str, real: type[SecondaryTierManager], **facts: Any) -> type[HostedTier]:
    """Return the class that stands in the place of one of vLLM's."""
    facts = {"cache_hit_source": real.cache_hit_source, **facts}
    return type(f"Hosted{real.__name__}", (HostedTier,), {"kind": kind, "real": real, **facts})


HOSTED: Final = {
    each.real: each
    for each in (
        hosted("example", ExampleSecondaryTierManager, ends_at_once=True),
        hosted("fs", FileSystemTierManager),
        hosted("obj", ObjectStoreSecondaryTierManager),
    )
}
REAL_CLASS_OF: Final = SecondaryTierFactory.get_tier_class


def real_classes() -> AbstractContextManager[object]:
    """Have vLLM's factory build its own tiers again: those that are hosted."""
    return patch.object(SecondaryTierFactory, "get_tier_class", REAL_CLASS_OF)


def hosted_class_of(tier_config: dict[str, Any]) -> type[SecondaryTierManager]:
    """Return the class that vLLM's factory builds during the tests."""
    real = REAL_CLASS_OF(tier_config)
    return HOSTED.get(real, real)


def wait_for(found: Callable[[], Answer]) -> Answer:
    """Ask until there is an answer, or patience ends; return the last."""
    for _ in range(int(PATIENCE_S / PAUSE_S)):
        if answer := found():
            return answer
        threading.Event().wait(PAUSE_S)
    return found()


def lookup_and_wait(
    tier: HostedTier, keys: list[bytes], ctx: ReqContext | None = None, timeout: float = PATIENCE_S
) -> list[LookupResult]:
    """Do what the function of this name in vLLM's tests does, by the interface alone."""
    del timeout
    context = ctx or ReqContext(req_id="test")
    return [tier.lookup(key, context) for key in keys]


# --- the plugin ---


class LeftOut(NamedTuple):
    """Some tests that can't pass here, or files of which none is about a tier that is hosted."""

    names: frozenset[str]
    reason: str


def read_left_out(kind: str) -> list[LeftOut]:
    """Read what is left out on this release: ``tests`` or ``files``."""
    release = ".".join(vllm.__version__.split(".")[:2])
    entries = tomllib.loads((HERE / "left_out.toml").read_text())[kind]
    return [
        LeftOut(frozenset(entry["names"]), entry["reason"])
        for entry in entries
        if release in entry.get("releases", [release])
    ]


class Hosting:
    """Puts hosted tiers in the place of vLLM's, and leaves out what is listed."""

    def __init__(self) -> None:
        self._files = read_left_out("files")
        self._reason_of = {
            name: each.reason for each in read_left_out("tests") for name in each.names
        }
        self._built_before = 0
        self._counts: Counter[tuple[str, bool]] = Counter()

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave files and folders out."""
        is_left_out = any(collection_path.name in each.names for each in self._files)
        return is_left_out or None  # None: somebody else may say so

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Replace the classes in each file that has been imported, and mark what is left out."""
        for module in {item.module for item in items}:
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and value in HOSTED:
                    setattr(module, name, HOSTED[value])
            if hasattr(module, "lookup_and_wait"):
                module.lookup_and_wait = lookup_and_wait
        seen = set()
        for item in items:
            name = item.nodeid.rpartition("/")[2].partition("[")[0]
            seen.add(name)
            if name in self._reason_of:
                item.add_marker(pytest.mark.xfail(reason=self._reason_of[name], strict=True))
        files = {name.partition("::")[0] for name in seen}
        known = {name for name in self._reason_of if name.partition("::")[0] in files}
        if known - seen:
            raise pytest.UsageError(f"left_out.toml names what there is not: {known - seen}")

    def pytest_runtest_logstart(self) -> None:
        """Begin a test."""
        self._built_before = HostedTier.built

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test, and whether it has built a tier."""
        if report.when == "call" or report.outcome != "passed":
            outcome = "left out" if hasattr(report, "wasxfail") else report.outcome
            self._counts[outcome, HostedTier.built > self._built_before] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many tests ran on a tier that kvtier hosts."""
        write = terminalreporter.write_line
        terminalreporter.section(f"vLLM {vllm.__version__}: its tests of its tiers")
        for is_hosted, what in ((True, "on tiers that kvtier hosts"), (False, "without a tier")):
            counts = {key[0]: count for key, count in self._counts.items() if key[1] is is_hosted}
            write(f"{what}: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
        for left in self._files:
            write(f"not run: {', '.join(sorted(left.names))}: {left.reason}")


def pytest_configure(config: pytest.Config) -> None:
    """Begin. Of kvtier's log, what goes wrong is enough."""
    quiet = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=quiet)
    SecondaryTierFactory.get_tier_class = hosted_class_of
    config.pluginmanager.register(Hosting())
