"""Accounts for the savings and costs of offloading, and for the reasons of misses."""
