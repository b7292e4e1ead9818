"""Configuration, read and checked while the engine starts."""
