"""Refuses to start if the host lacks memory for all its engines, before a model is loaded.

``cpu_bytes_to_use`` is per engine, and its workers share it. With data parallelism a host has
several engines, with one configuration and as much memory each: one may fit although all do not,
and the last of them would end when the models are loaded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from kvtier.settings.extra_config import WHERE, cpu_bytes_to_use
from kvtier.settings.host_memory import HostMemory
from kvtier.vllm.workarounds.connectors_beside import OWN_SPEC

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOOKED_BY: Final = "KVTIER_MEMORY_LOOKED_AT_BY"
"""The process that began the start. Its API servers build the configuration again, and by then the
engines may have allocated the memory."""


def require_memory(vllm_config: Any) -> None:  # noqa: ANN401 - vLLM is untyped here
    """Raise ``ConfigError`` unless there is memory for the engines about to start here."""
    parallel = vllm_config.parallel_config
    if "ray" in (parallel.distributed_executor_backend, parallel.data_parallel_backend):
        return  # they may start on another host
    this = str(os.getpid())
    if os.environ.setdefault(_LOOKED_BY, this) != this:
        return
    engines = int(parallel.data_parallel_size_local)
    first = int(parallel.data_parallel_rank)
    of = ""
    if engines > 1:
        ranks = ", ".join(map(str, range(first, first + engines)))
        of = f" for each of data-parallel ranks {ranks}"
    if parallel.world_size > 1:
        of += f" ({parallel.world_size} workers share it)"
    for extra in _own_settings(vllm_config.kv_transfer_config.kv_connector_extra_config):
        HostMemory(extra.get("cpu_bytes_to_use"), engines * cpu_bytes_to_use(extra), of).require()


def _own_settings(extra: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the settings of kvtier's spec: all of ``extra``, or one of several connectors'."""
    beside = [each.get(WHERE) for each in extra.get("connectors", ()) if isinstance(each, dict)]
    return [
        each
        for each in (extra, *beside)
        if isinstance(each, dict) and each.get("spec_name") == OWN_SPEC[0]
    ]
