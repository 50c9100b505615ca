"""C++ kernels of the training step: products, attention, norms, activations, loss, AdamW.

kernels/*.cc are compiled once for every instruction set (build.py); library.py loads the best that
the processor has; ops.py, products.py and attention.py make differentiable operations of them, each
with the name and the formula of its twin in PyTorch.
"""
