"""What names a block: all that changes its bytes, or what they mean."""
