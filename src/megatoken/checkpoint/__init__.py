"""Checkpoints: the commit protocol on disk, without torch, and the training state in them."""
