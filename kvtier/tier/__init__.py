"""Code that runs on a tier's own thread, or in its process."""
