"""Computes the namespace of a kvtier tier under vLLM's own ``TieringOffloadingSpec``.

vLLM gives a tier only the spec, whose ``OffloadingConfig`` has no more of the model than its name.
Under kvtier's own spec, rank 0 leaves its facts in the shared memory; here there is no place
for them. But vLLM builds a tier while it builds its connector, which has the whole configuration:
it is read from the frames of the calling functions. If it is not found there, the tier's blocks
are shared with no other engine, and none is found after a restart.

Only workers know the chosen attention backend; this process knows it only if they live in it. So
the inputs of that choice are facts instead: the requested backend, and the device. This gives an
engine the same facts wherever its workers live.

Rows have the same shape under both specs today. vLLM does not guarantee that, so the spec's
name is a fact: blocks of the two are never shared.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvtier.errors import InternalError
from kvtier.vllm.identity.namespace import build_namespace, facts_or_reason, worker_report
from kvtier.vllm.identity.plain_values import plain
from kvtier.vllm.memory.pages import Pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from vllm.v1.kv_offload.base import OffloadingSpec

    from kvtier.plugin_api.backend import Namespace

FRAMES_MAX: Final = 50
_NAME: Final = "vllm_config"
_PAGES: Final = "kv_cache_config"

_Thing = TypeVar("_Thing")


def namespace_of(spec: OffloadingSpec) -> Namespace:
    """Return the namespace of an engine's tiers. Scheduler process, while vLLM builds them."""
    kind = type(spec)
    groups = [group.group_id for group in spec.config.groups]
    described = facts_or_reason(lambda: engine_facts(groups))
    return build_namespace(
        spec.config, {**described, "spec": f"{kind.__module__}.{kind.__qualname__}"}
    )


def engine_facts(groups: Sequence[int]) -> dict[str, Any]:
    """Return the facts known here about the engine's model. Raises whatever vLLM's objects raise.

    ``groups``: the KV-cache groups that are offloaded.
    """
    config = _vllm_config()
    pages = next((Pages(each, groups) for each in _known_to_callers(_PAGES, KVCacheConfig)), None)
    return {**worker_report(config, pages), **_choices(config)}


def _choices(config: VllmConfig) -> dict[str, Any]:
    """Return the inputs by which workers choose an attention backend, and so the byte order."""
    attention = getattr(config, "attention_config", None)
    return {
        "attention_backends": None,
        "attention_asked_for": [
            plain(getattr(attention, "backend", None)),
            plain(getattr(attention, "backend_per_kind", None)),
            os.environ.get("VLLM_ATTENTION_BACKEND"),
        ],
        "device": str(current_platform.get_device_name()),
    }


def _vllm_config() -> VllmConfig:
    """Return the configuration of the engine that is being built. Raises ``InternalError``."""
    for config in vllm_configs():
        return config
    raise InternalError(f"none of the calls that lead to the tier has a {_NAME}")


def vllm_configs() -> Iterator[VllmConfig]:
    """Yield the configurations known here, the nearest first.

    In a ``MultiConnector`` the first is this connector's own, then comes the engine's.
    """
    current = get_current_vllm_config_or_none()
    if current is not None:
        yield current
    yield from _known_to_callers(_NAME, VllmConfig)


def _known_to_callers(name: str, kind: type[_Thing]) -> Iterator[_Thing]:
    """Yield the callers' local variables of a name, the nearest first."""
    for frame in callers():
        found = frame.f_locals.get(name)
        if isinstance(found, kind):
            yield found


def callers() -> Iterator[FrameType]:
    """Yield the frames of the callers, the nearest first."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - public in all but its name
    for _ in range(FRAMES_MAX):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
