"""Draws one page of a record, a replay or a soak: HTML and SVG, without scripts."""
