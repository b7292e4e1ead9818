"""The host memory that workers and scheduler share, and what lies where in it."""
