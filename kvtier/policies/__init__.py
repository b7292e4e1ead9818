"""Eviction policies, one file each, and the actor that hosts one."""
