"""Describes what was compared, and on what: the head of every report beside vLLM."""

from __future__ import annotations

from kvtier.tools.bench.about import about_machine


def about() -> dict[str, str | int]:
    """Return versions, vLLM's too, and the machine's kind."""
    import vllm  # noqa: PLC0415 - takes seconds: only once all has been measured

    return {**about_machine(), "vllm_version": str(vllm.__version__)}
