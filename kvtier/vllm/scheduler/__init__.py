"""What vLLM's scheduler asks, answered by kvtier's facade."""
