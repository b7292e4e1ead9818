"""The remote layer: tiers on servers that are killed, stopped, emptied, full and lied to."""
