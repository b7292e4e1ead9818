"""Rules of host memory, compared with free memory, the GPU's cache and the longest prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.machine import free_memory_bytes
from kvtier.plugin_api.options import shown
from kvtier.plugin_api.sizes import read_bytes, shown_bytes
from kvtier.settings.runtime_config import RuntimeConfig
from kvtier.tools.checking.rules import (
    CASCADES_BELOW_PROMPT,
    MEMORY_IN_USE,
    PRIMARY_BELOW_GPU,
    PRIMARY_BELOW_PROMPT,
)

if TYPE_CHECKING:
    from kvtier.tools.checking.findings import Findings
    from kvtier.tools.doctor.subject import Subject

KEY: Final = "cpu_bytes_to_use"
FRACTION: Final = "cascade_slots_fraction_max"


def look_at_sizes(subject: Subject, findings: Findings, *, runs: bool) -> None:
    """Note sizes that are too small. ``runs``: an engine has the memory already."""
    if not subject.primary_bytes:
        return
    given = f"{KEY}={shown(subject.extra.get(KEY))}"
    if not runs:
        _beside_what_is_free(subject, given, findings)
    _beside_gpu(subject, given, findings)
    _beside_prompt(subject, given, findings)


def _beside_what_is_free(subject: Subject, given: str, findings: Findings) -> None:
    free = free_memory_bytes(subject.machine.root)
    wanted = subject.primary_bytes * subject.engine.data_parallel_size
    if free is not None and free < wanted and not findings.refused:
        findings.add(
            MEMORY_IN_USE,
            f"{given}: {shown_bytes(wanted)} together, and {shown_bytes(free)} of memory are "
            "free now.",
            f"Lower {KEY}, or raise the container's memory limit, or end what uses the memory.",
        )


def _beside_gpu(subject: Subject, given: str, findings: Findings) -> None:
    engine = subject.engine
    primary_tokens = subject.slots * subject.block_tokens
    if subject.gpu_tokens and primary_tokens:
        holds, of_gpu = f"{primary_tokens:,} tokens", f"{subject.gpu_tokens:,}"
        is_smaller = primary_tokens < subject.gpu_tokens
    elif engine.kv_cache_memory_bytes is not None:
        # Each GPU has a part of each block; of a latent cache, each one has the whole.
        gpu_bytes = read_bytes(engine.kv_cache_memory_bytes, "--kv-cache-memory-bytes")
        gpu_bytes *= 1 if subject.is_latent else engine.tensor_parallel_size
        holds, of_gpu = shown_bytes(subject.primary_bytes), shown_bytes(gpu_bytes)
        is_smaller = subject.primary_bytes < gpu_bytes
    else:
        findings.not_checked.append(
            "whether host memory is larger than the GPU's own cache: give --kv-cache-memory-bytes, "
            "or the address of a running engine and --block-bytes"
        )
        return
    if is_smaller:
        findings.add(
            PRIMARY_BELOW_GPU,
            f"{given} holds {holds}, and the GPU's own KV cache {of_gpu}.",
            f"Raise {KEY} above the GPU's cache: twice as much is a start.",
        )


def _beside_prompt(subject: Subject, given: str, findings: Findings) -> None:
    blocks, slots = subject.prompt_blocks, subject.slots
    if not blocks or not slots:
        findings.not_checked.append(
            "whether host memory holds the longest prompt: give --max-model-len and --block-bytes, "
            "or --model"
        )
        return
    if slots < blocks:
        findings.add(
            PRIMARY_BELOW_PROMPT,
            f"{given} has {slots} slots, and {subject.longest_prompt} has {blocks} blocks.",
            f"Raise {KEY} to {shown_bytes(2 * blocks * subject.block_bytes)} or more, room for "
            "two.",
        )
        return
    fraction = subject.extra.get(FRACTION, RuntimeConfig.cascade_slots_fraction_max)
    if not subject.tiers or isinstance(fraction, bool) or not isinstance(fraction, int | float):
        return
    share = max(1, int(slots * fraction))
    if share < blocks:
        findings.add(
            CASCADES_BELOW_PROMPT,
            f"{FRACTION}={fraction} of {slots} slots are {share}, and {subject.longest_prompt} has "
            f"{blocks} blocks.",
            f"Raise {KEY}, or {FRACTION} up to 1.",
        )
