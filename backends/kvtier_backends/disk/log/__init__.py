"""The log of blocks: locates, writes, reads and reclaims them."""
