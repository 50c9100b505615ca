"""C++ kernels of the training step: matmuls, attention, norms, activations, loss, AdamW.

build.py compiles kernels/*.cc once for each instruction set, and selection.py loads the fastest
library that the processor can run. ops.py, products.py and attention.py wrap the kernels as
differentiable operations, each with the name and the formula of its counterpart in PyTorch.
"""
