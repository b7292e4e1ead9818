"""What a prefix costs to load or to compute, and where to cut it."""
