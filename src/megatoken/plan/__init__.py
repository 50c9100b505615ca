"""Estimate a run before it starts: does it fit, how long does it take, what does it cost?"""
