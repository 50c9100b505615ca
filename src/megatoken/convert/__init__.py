"""Loads and exports models of other programs, and translates their recipes."""
