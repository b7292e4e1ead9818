"""Made-up traces of other shapes than the public ones, to judge eviction policies by."""
