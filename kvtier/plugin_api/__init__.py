"""Modules that a third party's backend or policy may import."""
