"""A runtime with its real tiers, threads and processes, over real files."""
