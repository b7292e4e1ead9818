"""The part of kvtier that runs on the scheduler's thread."""
