"""From text to batches: sources -> documents -> tokenizer -> prepare -> shards -> loader."""
