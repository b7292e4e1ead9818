"""The folder: claimed, opened and recovered."""
