"""Text generation: `generate` for text, `generate_ids` for token ids."""
