"""Faults of kvtier's past, put back on order: a soak must find them."""
