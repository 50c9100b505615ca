"""Checkpoints: how they are committed to disk, and how training state is saved and restored."""
