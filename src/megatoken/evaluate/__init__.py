"""How good is a live model."""
