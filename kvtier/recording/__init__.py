"""Records an engine's requests in a file that ``kvtier replay`` and ``kvtier size`` read."""
