"""What the engine's cell and the tiers' cells share."""
