"""Checkpoints: the commit protocol on disk (store, no torch) and what goes in and comes out of it (restore)."""
