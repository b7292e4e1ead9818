"""Implements vLLM's interfaces on the scheduler's side with kvtier's facade."""
