"""What the tiers have in common whose storage others use too: names, and records of blocks."""
