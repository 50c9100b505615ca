"""The network, its loss and its arithmetic.

Plain PyTorch: parallelism and compilation are applied from outside.
"""
