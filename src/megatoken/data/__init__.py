"""Shards of tokens to batches: batch n is a pure function of dataset, seed and n."""
