"""Reads the kind of a model's KV-cache groups: how far each looks back, and which are a draft's.

The connector gets this, but the manager behind it does not. A group's kind can't be inferred from
vLLM's lookups: a window of one block is looked up like the head of a prompt. So kvtier keeps the
configuration that the connector derives from vLLM's (``workarounds/connector_hooks.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.plugin_api.log import log
from kvtier.vllm.relied_on import REMEDY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.kv_offload.base import OffloadingSpec


class GroupKind(NamedTuple):
    """The blocks of a group that a prefix needs, as vLLM's connector looks them up."""

    window: int | None = None  #: the last ``window`` chunks; None: all of them
    reach: int = 0  #: this many tokens before the prefix's end, if that is further back
    beyond: int = 0  #: this many chunks behind its end, with which a draft is recomputed


def kinds_of(config: Any) -> dict[bytes, GroupKind]:  # noqa: ANN401 - vLLM has no stubs
    """Return the group kinds in the configuration that vLLM's connector derives."""
    return {_name(group.group_idx): _kind(group) for group in config.kv_group_configs}


def group_kinds(spec: OffloadingSpec) -> Mapping[bytes, GroupKind]:
    """Return the kind of each of an engine's groups, by the last bytes of its keys."""
    known: Mapping[bytes, GroupKind] | None = getattr(spec, "group_kinds", None)
    if known is not None:
        return known
    if len(spec.config.groups) > 1:
        log.warning(
            "this vLLM does not report which layers have a limited attention window: blocks of "
            "models with such layers may be found in the primary tier only",
            remedy=REMEDY,
        )
    return {_name(group.group_id): GroupKind() for group in spec.config.groups}


def _name(number: int) -> bytes:
    return number.to_bytes(GROUP_BYTES, "big")


def _kind(group: Any) -> GroupKind:  # noqa: ANN401 - vLLM has no stubs
    spec = group.kv_cache_spec
    reach = 0
    if isinstance(spec, SlidingWindowSpec):
        # A prefix may end within a chunk. vLLM then looks up the window's blocks before that.
        reach = int(spec.sliding_window) - 1 + int(spec.extra_retained_tokens)
    return GroupKind(group.sliding_window_size_in_chunks, reach, int(group.is_eagle_group))
