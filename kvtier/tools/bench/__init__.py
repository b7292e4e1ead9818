"""Benchmarks of kvtier beside vLLM's own tiering. They need vLLM; ``kvtier bench`` runs them."""
