"""The log of blocks: where each lies, and how it is written, read and reclaimed."""
