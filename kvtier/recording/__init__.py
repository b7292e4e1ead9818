"""Records what an engine was asked, in a file that ``kvtier replay`` and ``kvtier size`` read."""
