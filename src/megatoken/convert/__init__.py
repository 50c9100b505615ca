"""Load and export models of other programs, and translate their recipes."""
