"""Secret keys and their use: they keep others from reading or planting blocks."""
