"""What keeps others from reading blocks, and from planting any: secret keys, and their use."""
