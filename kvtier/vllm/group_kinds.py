"""What vLLM knows of a model's KV-cache groups: how far each looks back, and which are a draft's.

The connector is told, and the manager behind it is not. A group's kind can't be seen from what
vLLM asks for: a window of one block is asked for as the head of a prompt is. So what vLLM's
connector makes of its own configuration is kept, for the spec that it makes it for.
"""

from __future__ import annotations

import threading
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    SchedulerOffloadConfig,
)
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvtier.plugin_api.keys import GROUP_BYTES
from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.v1.kv_offload.base import OffloadingSpec


class GroupKind(NamedTuple):
    """What of a group's blocks a prefix needs, as vLLM's connector looks for them."""

    window: int | None = None  #: the last so many chunks; None: all of them
    reach: int = 0  #: so many tokens before the prefix's end, if they lie further back than that
    beyond: int = 0  #: so many chunks behind its end, which a draft is computed with anew


_hooking = threading.Lock()
_is_hooked = False


def keep_group_kinds() -> None:
    """Have vLLM's connector tell kvtier's spec what it knows of groups."""
    global _is_hooked  # noqa: PLW0603 - vLLM's class is this process's, too
    with _hooking:
        if not _is_hooked:
            real = SchedulerOffloadConfig.from_spec.__func__
            SchedulerOffloadConfig.from_spec = classmethod(_telling(real))
            _is_hooked = True


def _telling(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def from_spec(
        cls: Any,  # noqa: ANN401 - vLLM has no stubs
        spec: OffloadingSpec,
        *configs: Any,  # noqa: ANN401 - as above
        **named: Any,  # noqa: ANN401 - as above
    ) -> Any:  # noqa: ANN401 - as above
        made = real(cls, spec, *configs, **named)
        on_groups_known = getattr(spec, "on_groups_known", None)
        if on_groups_known is not None:
            on_groups_known({_name(each.group_idx): _kind(each) for each in made.kv_group_configs})
        return made

    return from_spec


def group_kinds(spec: OffloadingSpec) -> Mapping[bytes, GroupKind]:
    """Return the kind of each group of an engine, by the bytes that its keys end in."""
    known: Mapping[bytes, GroupKind] | None = getattr(spec, "group_kinds", None)
    if known is not None:
        return known
    if len(spec.config.groups) > 1:
        log.warning(
            "this vLLM does not tell which layers look back a limited way: blocks of models that "
            "have such layers may be found in no tier but the primary",
            remedy="use vLLM 0.32 or 0.33",
        )
    return {_name(group.group_id): GroupKind() for group in spec.config.groups}


def _name(number: int) -> bytes:
    return number.to_bytes(GROUP_BYTES, "big")


def _kind(group: Any) -> GroupKind:  # noqa: ANN401 - vLLM has no stubs
    spec = group.kv_cache_spec
    reach = 0
    if isinstance(spec, SlidingWindowSpec):
        # A prefix may end within a chunk. vLLM then looks for what the window needs before that.
        reach = int(spec.sliding_window) - 1 + int(spec.extra_retained_tokens)
    return GroupKind(group.sliding_window_size_in_chunks, reach, int(group.is_eagle_group))
