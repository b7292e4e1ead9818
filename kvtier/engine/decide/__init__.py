"""Estimates the cost of loading or computing a prefix, and decides where to cut it."""
