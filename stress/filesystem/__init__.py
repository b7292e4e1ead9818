"""The same runtime, over a FUSE filesystem that misbehaves when it is told to."""
