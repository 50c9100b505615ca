"""The model, its loss, and its FLOP and memory counts.

All of it is plain PyTorch: parallelism and compilation are applied from outside.
"""
