"""Identifies blocks: collects all that changes a block's bytes, or their meaning."""
