"""Measure this machine: the ladder of speed-ups, and each part of it alone.

Every bench is one module with one function `run(options, console) -> answer`: it prints its table while it measures
and returns what its JSON line says. options.py declares the arguments without torch, program.py runs a bench and keeps
its record.
"""
