"""Who is decayed, and how fast we go. AdamW itself is torch's."""
