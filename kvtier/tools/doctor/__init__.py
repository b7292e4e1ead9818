"""Examines a configuration, the machine that it is for, and running engines."""
