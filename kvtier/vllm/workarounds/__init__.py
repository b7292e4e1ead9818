"""Works around faults and gaps of vLLM: a file for each, with its symptom and its releases."""
