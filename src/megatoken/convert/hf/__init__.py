"""Hugging Face's model folders, in both directions."""
