"""Faults and gaps of vLLM, one a file: what is seen without it, and in which releases."""
