"""vLLM's own secondary tiers, hosted unchanged as tiers of kvtier."""
