"""Doors to other tools: weights by name, Hugging Face folders in."""
