"""Carriers of a tier's cell: a thread of the engine's process, or a process of its own."""
