"""What a run is made of: every field, typed, documented and checked."""
