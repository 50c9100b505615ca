"""Raw text to shards of tokens: sources, documents, tokenizers, conversations."""
