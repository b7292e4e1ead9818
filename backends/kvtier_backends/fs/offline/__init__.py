"""Lists, verifies, purges and bounds the folder of an ``fs`` tier from outside."""
