"""The folder of an ``fs`` tier from outside: listed, verified, purged and kept within a bound."""
