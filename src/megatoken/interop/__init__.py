"""Doors to other tools: weights by name, other programs' forms in and out, their recipes told as ours."""
