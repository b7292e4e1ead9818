"""Eviction and admission policies, one file each."""
