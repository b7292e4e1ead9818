"""Recommends the size of a tier, from the size of a model's tokens and the gain of each size."""
