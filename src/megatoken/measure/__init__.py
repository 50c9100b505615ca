"""Measure a run before it starts: a dry run without memory, and a calibration on this machine."""
