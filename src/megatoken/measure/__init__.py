"""Measure a run before it starts: a dry run on fake tensors, and a calibration on this machine."""
