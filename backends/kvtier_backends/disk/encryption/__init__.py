"""Applies AES-256-GCM between the backend and the log."""
