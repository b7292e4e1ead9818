"""Which blocks are worth writing to a tier."""
