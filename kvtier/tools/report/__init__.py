"""One page of what was recorded, replayed or soaked: HTML and SVG, without scripts."""
