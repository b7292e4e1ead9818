"""Names and block records, common to the tiers whose storage others use too."""
