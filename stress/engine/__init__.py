"""A whole vLLM server with kvtier in it, and clients that are impatient."""
