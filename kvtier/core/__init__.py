"""Types and actors shared by the engine's cell and the tiers' cells."""
