"""The settings of a run, each typed, documented and checked."""
