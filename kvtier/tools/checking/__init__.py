"""Finds what an engine would refuse in a configuration, without an engine."""
