"""Lists, verifies and purges a folder from outside, for command-line tools."""
