"""The folder from outside: listed, verified and purged by a person's tools."""
