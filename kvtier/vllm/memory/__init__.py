"""The host memory that workers and scheduler share, and its layout."""
