"""Hosts vLLM's own secondary tiers, unchanged, as tiers of kvtier."""
