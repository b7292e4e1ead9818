"""Accounts for what offloading gives and costs, and for why requests miss."""
