"""Wraps methods of vLLM's connector, most of them to get facts that the manager lacks.

- ``from_spec``: how far each group looks back, and which are a draft's (``memory/group_kinds.py``).
  It also warns of vLLM's errors with Mamba layers, and prevents them if possible.
- ``get_num_new_matched_tokens``: which requests wait (``resumed.py``), or start, and from what hit
  in the engine's own prefix cache (``scheduler/requests.py``, ``recording.py``).
- ``request_finished``: which requests end, a step before vLLM's report (``scheduler/metrics.py``).
  It also adds to their responses (``scheduler/request_report.py``).
- ``register_kv_caches``, in workers: the layout of the KV caches (``identity/page_facts.py``).
- ``build_connector_meta``, in releases that would store wrong blocks of a prompt that is streamed.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    SchedulerOffloadConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_cache_interface import MambaSpec

from kvtier.plugin_api.log import log
from kvtier.vllm.memory.group_kinds import kinds_of
from kvtier.vllm.releases import REPLACES_TABLES, sync_load_budget
from kvtier.vllm.workarounds.hooking import once_a_process

if TYPE_CHECKING:
    from collections.abc import Callable

_AT_ONCE: Final = "sync_load_budget_bytes"


@once_a_process
def hook_connector() -> None:
    """Wrap the methods of this process's vLLM, unless they are wrapped. Any thread."""
    SchedulerOffloadConfig.from_spec = classmethod(
        _telling_groups(SchedulerOffloadConfig.from_spec.__func__)
    )
    OffloadingConnectorScheduler.get_num_new_matched_tokens = _telling_who_waits(
        OffloadingConnectorScheduler.get_num_new_matched_tokens
    )
    OffloadingConnectorScheduler.request_finished = _telling_who_ends(
        OffloadingConnectorScheduler.request_finished
    )
    OffloadingConnectorWorker.register_kv_caches = _telling_pages(
        OffloadingConnectorWorker.register_kv_caches
    )
    if not REPLACES_TABLES:
        OffloadingConnectorScheduler.build_connector_meta = _emptying_tables(
            OffloadingConnectorScheduler.build_connector_meta
        )


def _telling_groups(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that vLLM's connector calls before it creates a manager."""

    @wraps(real)
    def from_spec(cls: Any, spec: Any, *rest: Any, **named: Any) -> Any:  # noqa: ANN401 - no stubs
        made = real(cls, spec, *rest, **named)
        on_groups_known = getattr(spec, "on_groups_known", None)
        if on_groups_known is None:
            return made
        on_groups_known(kinds_of(made))
        if _misnames_states(made):
            log.warning(
                "with --prefix-match-unit vLLM may store a Mamba state from within a block under "
                "the name of the whole block: its prefix cache then serves a wrong state to other "
                "requests, and so does each tier",
                remedy="remove --prefix-match-unit",
            )
        if _loads_states_at_once(made):
            log.warning(
                f"{_AT_ONCE} is not used: the model has Mamba layers, and vLLM would end the "
                "engine when the GPU's blocks run out",
                remedy="remove the key",
            )
            spec.extra_config[_AT_ONCE] = 0
            made = real(cls, spec, *rest, **named)
        return made

    return from_spec


def _misnames_states(made: Any) -> bool:  # noqa: ANN401 - vLLM has no stubs
    """Return whether vLLM may give a state within a block the name of the whole block.

    It does if a hit ends within the block, and the step that continues from there keeps a later
    state. Mamba 2 does that in both releases.
    """
    return any(
        each.kv_cache_spec.num_prefill_checkpoint_blocks > 0
        and each.tokens_per_block > made.tokens_per_hash
        for each in _groups_of_states(made)
    )


def _loads_states_at_once(made: Any) -> bool:  # noqa: ANN401 - vLLM has no stubs
    """Return whether a state may be loaded in the step that computes with it.

    For such a load vLLM counts one GPU block fewer than it allocates, and ends the engine if
    none is left for that one.
    """
    return bool(_groups_of_states(made)) and sync_load_budget(made) > 0


def _groups_of_states(made: Any) -> list[Any]:  # noqa: ANN401 - vLLM has no stubs
    return [each for each in made.kv_group_configs if isinstance(each.kv_cache_spec, MambaSpec)]


def _telling_who_waits(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def get_num_new_matched_tokens(
        connector: OffloadingConnectorScheduler,
        request: Any,  # noqa: ANN401 - vLLM has no stubs
        num_computed_tokens: int,
        *rest: Any,  # noqa: ANN401 - as above
        **named: Any,  # noqa: ANN401 - as above
    ) -> Any:  # noqa: ANN401 - as above
        found = real(connector, request, num_computed_tokens, *rest, **named)
        on_request_matched = getattr(connector.manager, "on_request_matched", None)
        if on_request_matched is not None:
            on_request_matched(request, num_computed_tokens)
        requests = getattr(connector.manager, "requests", None)
        if requests is not None:
            requests.on_matched(request.request_id, num_computed_tokens)
        if found[0] is None:
            on_request_waits = getattr(connector.manager, "on_request_waits", None)
            if on_request_waits is not None:
                on_request_waits(request.request_id)
        return found

    return get_num_new_matched_tokens


def _telling_who_ends(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def request_finished(
        connector: OffloadingConnectorScheduler,
        request: Any,  # noqa: ANN401 - vLLM has no stubs
        *rest: Any,  # noqa: ANN401 - as above
        **named: Any,  # noqa: ANN401 - as above
    ) -> Any:  # noqa: ANN401 - as above
        on_request_ends = getattr(connector.manager, "on_request_ends", None)
        extra = on_request_ends(request) if on_request_ends is not None else None
        is_saved_later, params = real(connector, request, *rest, **named)
        return is_saved_later, params if extra is None else {**(params or {}), **extra}

    return request_finished


def _telling_pages(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that creates a worker for KV caches and passes it only their sizes."""

    @wraps(real)
    def register_kv_caches(connector: OffloadingConnectorWorker, kv_caches: Any) -> Any:  # noqa: ANN401 - no stubs
        on_caches_known = getattr(connector.spec, "on_caches_known", None)
        if on_caches_known is not None:
            on_caches_known(connector.kv_cache_config, kv_caches)
        return real(connector, kv_caches)

    return register_kv_caches


def _emptying_tables(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that first reads a step's tables of GPU blocks."""

    @wraps(real)
    def build_connector_meta(
        connector: OffloadingConnectorScheduler,
        scheduled: Any,  # noqa: ANN401 - vLLM has no stubs
    ) -> Any:  # noqa: ANN401 - as above
        for new in scheduled.scheduled_new_reqs:
            for group in connector._req_status[new.req_id].group_states:  # noqa: SLF001 - as above
                group.block_ids.clear()
        return real(connector, scheduled)

    return build_connector_meta
