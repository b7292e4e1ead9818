"""The benchmark of tiers that users run: ``kvtier bench``."""
