"""Finds an engine's refusals of a configuration, without an engine."""
