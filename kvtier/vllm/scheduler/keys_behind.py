"""Computes the keys that vLLM looks up after the first one of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.vllm.releases import positions_of

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext


def keys_behind(key: bytes, req_context: ReqContext, chunk_tokens: int) -> list[bytes]:
    """Return the request's keys behind ``key``, in order; none if it is not one of them.

    Only those within its ``max_load_tokens``: vLLM looks up no others. ``chunk_tokens``: the
    number of tokens that each key covers.
    """
    keys = list(positions_of(req_context))
    try:
        first = keys.index(key)
    except ValueError:
        return []
    end = None
    params = req_context.kv_transfer_params
    if params:
        tokens = params.get("max_load_tokens")
        if type(tokens) is int and tokens >= 0:  # vLLM accepts nothing else as a cap
            end = first + max(1, tokens // chunk_tokens)
    return keys[first + 1 : end]
