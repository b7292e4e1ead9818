"""One tier behind another program's primary tier."""
