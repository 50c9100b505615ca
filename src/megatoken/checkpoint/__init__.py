"""Checkpoints: the commit protocol on disk (commit, manifest; no torch) and the training state in them (save, load)."""
