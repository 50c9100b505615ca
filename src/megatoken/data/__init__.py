"""Text in, batches of token ids out: sources -> documents -> tokenizer -> prepare -> shards -> loader."""
