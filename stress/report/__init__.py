"""What people read of a run: one screen, one JSON file, and one page."""
