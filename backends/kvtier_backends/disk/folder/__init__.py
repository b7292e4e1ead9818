"""Claims, opens and recovers the folder."""
