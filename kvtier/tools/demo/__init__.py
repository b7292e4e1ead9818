"""``python -m kvtier.tools.demo``: kvtier in a real vLLM engine, in about a minute."""
