"""Benchmarks of kvtier by itself and beside vLLM's own tiering: ``stress.bench``."""
