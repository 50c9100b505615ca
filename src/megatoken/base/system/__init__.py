"""Detect this machine's hardware and software, and use its files, processes and clock safely."""
