"""`windlass plot`: curves of runs as an SVG or PNG file."""
