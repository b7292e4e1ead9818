"""Eviction policies: one file, or folder, for each."""
